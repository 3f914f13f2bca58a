"""Ranges, scales, ticks and colours of a panel's axes, to be kept from one drawing to the next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import QuadMesh
from matplotlib.ticker import Formatter, Locator

from gradlens.instruments.scales import StepLabels

if TYPE_CHECKING:
    from matplotlib.colors import Norm  # since matplotlib 3.11

Interval = tuple[float, float]


@dataclass(frozen=True)
class Ruler:
    """One direction of an axis: its range, its scale and its ticks."""

    limits: Interval
    scale: str
    options: tuple[tuple[str, float], ...]
    locators: tuple[Locator, Locator]
    formatters: tuple[Formatter, Formatter]

    @classmethod
    def of(cls, axis: Axis, limits: Interval) -> Ruler:
        """The ruler of an axis."""
        transform = axis.get_transform()
        names = ("base", "linthresh", "linscale") if axis.get_scale() == "symlog" else ()
        return cls(
            limits,
            axis.get_scale(),
            tuple((name, getattr(transform, name)) for name in names),
            (axis.get_major_locator(), axis.get_minor_locator()),
            (axis.get_major_formatter(), axis.get_minor_formatter()),
        )

    def widened(self, other: Ruler) -> Ruler:
        """A ruler with the ranges of both, if both have the same scale."""
        if other.scale != self.scale:
            return self
        ends = (*self.limits, *other.limits)
        upwards = self.limits[0] <= self.limits[1]
        limits = (min(ends), max(ends)) if upwards else (max(ends), min(ends))
        return replace(self, limits=limits)

    def apply(self, axis: Axis, set_scale: Callable[..., None], set_limits: Any) -> None:
        """Set the range, scale and ticks of an axis."""
        now = Ruler.of(axis, self.limits)
        if (now.scale, now.options) != (self.scale, self.options):
            set_scale(self.scale, **dict(self.options))
        axis.set_major_locator(copy.copy(self.locators[0]))
        axis.set_minor_locator(copy.copy(self.locators[1]))
        axis.set_major_formatter(copy.copy(self.formatters[0]))
        axis.set_minor_formatter(copy.copy(self.formatters[1]))
        set_limits(*self.limits)


@dataclass(frozen=True)
class Look:
    """Rulers and colours of an axis; ``whole`` if it shows all steps."""

    across: Ruler
    up: Ruler
    whole: bool
    colours: tuple[Norm, ...]

    @classmethod
    def of(cls, ax: Axes) -> Look:
        """The look of an axis."""
        over_steps = isinstance(ax.xaxis.get_major_formatter(), StepLabels)
        norms = tuple(mesh.norm for mesh in _meshes(ax)) if over_steps else ()
        across, up = Ruler.of(ax.xaxis, ax.get_xlim()), Ruler.of(ax.yaxis, ax.get_ylim())
        return cls(across, up, over_steps or not ax.axison, norms)

    def widened(self, ax: Axes) -> Look:
        """A look with the ranges of both axes, unless one of them shows all steps."""
        other = Look.of(ax)
        if self.whole or other.whole or not ax.has_data():
            return self
        return replace(self, across=self.across.widened(other.across), up=self.up.widened(other.up))

    def apply(self, ax: Axes) -> None:
        """Set the rulers and colours of an axis."""
        for mesh, norm in zip(_meshes(ax), self.colours, strict=False):
            mesh.set_norm(norm)
        self.across.apply(ax.xaxis, ax.set_xscale, ax.set_xlim)
        self.up.apply(ax.yaxis, ax.set_yscale, ax.set_ylim)


Looks = tuple[Look, ...]
"""The looks of a panel's axis and of the axes inside it."""


def look_of_panel(ax: Axes) -> Looks:
    """The looks of a panel."""
    return tuple(map(Look.of, _with_children(ax)))


def shows_single_steps(panel: Looks) -> bool:
    """Whether an axis in a panel shows single steps instead of all.

    A panel with colours over steps shows all steps; its second axis explains the colours.
    """
    return not all(look.whole for look in panel) and not any(look.colours for look in panel)


def widened(panel: Looks, ax: Axes) -> Looks:
    """The looks of a panel, with the ranges that it has at another step too."""
    pairs = _pairs(panel, ax)
    return tuple(look.widened(one) for look, one in pairs) if pairs else panel


def apply(panel: Looks, ax: Axes) -> None:
    """Set the looks of a panel."""
    for look, one in _pairs(panel, ax):
        look.apply(one)


def _pairs(panel: Looks, ax: Axes) -> list[tuple[Look, Axes]]:
    axes = list(_with_children(ax))
    # A panel without data may have no axes inside.
    return list(zip(panel, axes, strict=True)) if len(panel) == len(axes) else []


def _with_children(ax: Axes) -> Iterator[Axes]:
    yield ax
    for child in ax.child_axes:
        if isinstance(child, Axes):
            yield from _with_children(child)


def _meshes(ax: Axes) -> list[QuadMesh]:
    return [mesh for mesh in ax.collections if isinstance(mesh, QuadMesh)]
