"""Histograms of gradient elements for each parameter."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from gradlens.history.histograms import Histogram, by_parameter, latest
from gradlens.history.history import History
from gradlens.instruments.drawing import label_rows, row_stride, small_panels
from gradlens.instruments.histogram_1d import fill, label_elements, show_elements
from gradlens.instruments.histogram_2d import draw_joint
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layer_map import row_labels
from gradlens.instruments.panel import Artists, Drawn
from gradlens.instruments.scales import number_label
from gradlens.instruments.series import input_to_output
from gradlens.instruments.style import (
    ALARM,
    FAINT,
    INK,
    MUTED,
    SMALLEST_SIZE,
    TEXT_SIZE,
    TICK_SIZE,
    density_colormap,
    inside,
    message,
    points,
    shorten,
    shorten_apart,
    size_in_points,
    subtitle,
    text_width,
)

GAP = (16.0, 30.0)
"""Points between small panels, across and up."""


MOST = 48
"""Largest number of small panels; more parameters are rows of colour instead."""


class _ParameterPanels(Instrument, ABC):
    """What histograms of each parameter show at the latest step, in small panels."""

    together: ClassVar[bool] = False
    secondary: ClassVar[bool] = True
    part: ClassVar[str] = "parameters"
    columns: ClassVar[int] = 6
    width: ClassVar[float] = 4.0

    @final
    def _latest(self, history: History) -> tuple[int, dict[str, Histogram]]:
        """The latest step, and the histograms of its parameters from input to output."""
        found = latest(history[self.names[0]], self.part)
        assert found is not None
        step, parts = found[0], by_parameter(*found)
        return step, {name: parts[name] for name in input_to_output(tuple(parts), history)}


class LayerHistogramsInstrument(_ParameterPanels):
    """Density of gradient elements at the latest step, a small panel for each parameter.

    All panels have the same range of elements, so that those of a vanishing gradient are narrow.
    For very many parameters, there is one panel with a row for each, and colour is log density.
    """

    kinds: ClassVar[tuple[str, ...]] = ("GradHist1d",)
    title: ClassVar[str] = "Gradient elements by parameter"

    def content(self, history: History) -> Drawn:
        step, ordered = self._latest(history)
        if len(ordered) > MOST:
            labels = row_labels([*ordered], history)
            return Drawn(lambda ax, axis: _carpet(ax, step, ordered, labels))
        return Drawn(lambda ax, axis: _panels(ax, step, ordered, self.columns))


class LayerJointHistogramsInstrument(_ParameterPanels):
    """Gradient elements and parameter values at the latest step, a small panel for each parameter.

    All panels have the same two ranges, and the colour is the logarithm of the count. There are
    ``MOST`` panels at most, those nearest to the input.
    """

    kinds: ClassVar[tuple[str, ...]] = ("GradHist2d",)
    title: ClassVar[str] = "Joint histogram by parameter"

    def content(self, history: History) -> Drawn:
        step, parts = self._latest(history)
        return Drawn(lambda ax, axis: _joint_panels(ax, step, parts, self.columns))


def _panels(ax: Axes, step: int, parts: Mapping[str, Histogram], columns: int) -> Artists:
    artists: Artists = {}
    shown = _common_range(list(parts.values()))
    for panel, (name, one) in zip(
        small_panels(ax, len(parts), columns, GAP), parts.items(), strict=True
    ):
        drawn = _small(panel, name, one, shown)
        artists |= {f"{name}: {key}": artist for key, artist in drawn.items()}
    words = f"step {step:,} · density, log · orange: clipped · from input to output"
    return artists | {"subtitle": subtitle(ax, words)}


def _joint_panels(ax: Axes, step: int, parts: Mapping[str, Histogram], columns: int) -> Artists:
    names = [*parts][:MOST]
    shown = [parts[name] for name in names]
    ranges = [_common_range(shown, side) for side in (0, 1)]
    artists: Artists = {}
    for panel, name, one in zip(
        small_panels(ax, len(shown), columns, GAP), names, shown, strict=True
    ):
        artists[f"{name}: joint"] = _small_joint(panel, name, one, ranges)
    first = f"first {len(shown)} of {len(parts)}, " if len(parts) > len(shown) else ""
    words = f"step {step:,} · across: gₙ, up: parameter · colour: count, log · {first}"
    return artists | {"subtitle": subtitle(ax, f"{words}from input to output")}


def _small_joint(
    ax: Axes, name: str, one: Histogram, ranges: Sequence[tuple[float, float]]
) -> Artist:
    _heading(ax, name, one)
    if not one.counts.any():
        ax.set_xticks([])
        return message(ax, "no finite element")
    mesh = draw_joint(ax, one)
    ax.set_xlim(ranges[0])
    ax.set_ylim(ranges[1])
    ax.yaxis.set_major_locator(NullLocator())
    _ends(ax, ranges[0])
    return mesh


def _carpet(ax: Axes, step: int, parts: Mapping[str, Histogram], names: Sequence[str]) -> Artists:
    width, height = size_in_points(ax)
    stride = row_stride(len(parts), height)
    labels = shorten_apart(names[::stride], 0.3 * width, TICK_SIZE)
    left = (max(text_width(label, TICK_SIZE) for label in labels) - points(24)) / width
    inner = inside(ax, max(left, 0.0), 0, 1 - max(left, 0.0), 1)
    densities = np.array([one.density for one in parts.values()])
    edges = next(iter(parts.values())).edges[0]
    shown = densities[densities > 0]
    low, high = (shown.min(), shown.max()) if shown.size else (1.0, 10.0)
    mesh = inner.pcolormesh(
        edges,
        np.arange(len(parts) + 1),
        np.ma.masked_equal(densities, 0),
        norm=LogNorm(low, max(high, 2 * low)),
        cmap=density_colormap(),
        rasterized=True,
    )
    show_elements(inner, list(parts.values()))
    label_elements(inner)
    label_rows(inner, labels, stride, len(parts))
    words = f"step {step:,} · colour: density, log · from input to output"
    return {"carpet": mesh, "subtitle": subtitle(ax, words)}


def _common_range(parts: Sequence[Histogram], side: int = 0) -> tuple[float, float]:
    filled = [one.occupied(side) for one in parts if one.counts.any()] or [(-1.0, 1.0)]
    return min(low for low, _ in filled), max(high for _, high in filled)


def _small(ax: Axes, name: str, one: Histogram, shown: tuple[float, float]) -> Artists:
    _heading(ax, name, one)
    if not one.counts.any():
        ax.set_xticks([])
        return {"message": message(ax, "no finite element")}
    artists = fill(ax, one)
    show_elements(ax, [one])
    ax.set_xlim(shown)
    ax.yaxis.set_major_locator(NullLocator())
    ax.axvline(0, color=FAINT, linewidth=0.7, zorder=5)
    _ends(ax, shown)
    return artists


def _heading(ax: Axes, name: str, one: Histogram) -> None:
    place: dict[str, Any] = {"fontsize": TEXT_SIZE, "y": 1.0, "pad": 3.0}
    width, excess = size_in_points(ax)[0], one.excess()
    room = width - text_width(excess, TEXT_SIZE) - 6
    if room < 0.5 * width:
        # There is no room for it; the colour of the outer bins shows it too.
        room, excess = width, ""
    ax.set_title(shorten(name, room, TEXT_SIZE), loc="left", color=INK, **place)
    ax.set_title(excess, loc="right", color=ALARM if one.nan else MUTED, **place)


def _ends(ax: Axes, shown: tuple[float, float]) -> None:
    # Only the two ends of the range are labelled, because there is no room for more.
    labels = [number_label(end, 2) for end in shown]
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_major_formatter(FixedFormatter(labels))
    ax.tick_params(axis="x", labelsize=SMALLEST_SIZE)
    left, right = ax.get_xticklabels()
    left.set_horizontalalignment("left")
    right.set_horizontalalignment("right")
