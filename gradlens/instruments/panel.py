"""What a panel shows, as data: figures and pages draw the same from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize

from gradlens.history.lines import Floats, Line
from gradlens.history.view import Group
from gradlens.instruments.scales import (
    Ruler,
    Scale,
    StepAxis,
    allowed,
    number_label,
    ruler,
    within_reach,
    without_spikes,
)
from gradlens.instruments.series import LayerTable, Warp, lowest_and_highest, quantiles, smooth
from gradlens.instruments.style import BLUE, ORANGE, PURPLE, Color, Entry, sequence_colors

MOST_LINES = 12
"""Largest number of lines that can be told apart."""

Artists = dict[str, Artist]
LineStyle = str | tuple[float, tuple[float, ...]]
Readout = tuple[str, bool]
"""What is on the right of a title, and whether it is an alarm."""


@dataclass(frozen=True)
class Curve:
    """A number per step.

    ``spreads`` are the lower and the upper ends of intervals around it, the widest first. A curve
    without a ``style`` is solid, or dashed where it would hide an earlier one; ``width`` is in
    points.
    """

    name: str
    line: Line
    color: Color = BLUE
    width: float = 1.6
    style: LineStyle | None = None
    spreads: tuple[tuple[Line, Line], ...] = ()
    unit: str = ""


@dataclass(frozen=True)
class Shape:
    """Points ``x`` and ``y`` ``[K]`` on two axes, as a line with gaps at NaNs, or as points.

    An area is between ``low`` ``[K]`` and ``y``. An arrow goes from the first point to the last.
    ``width`` is that of a line or a point, in points.
    """

    name: str
    x: Floats
    y: Floats
    color: Color = BLUE
    kind: Literal["line", "area", "points", "arrow"] = "line"
    low: Floats | None = None
    width: float = 1.0
    style: LineStyle = "-"
    opacity: float = 1.0


@dataclass(frozen=True)
class Picture:
    """Sizes ``[R, C]`` as colours, on a logarithmic scale; zero has none.

    Cells are between the edges ``columns`` ``[C + 1]`` and ``rows`` ``[R + 1]`` on the axes
    ``across`` and ``up``. With ``labels`` ``[R]``, the first row is on top. With ``margins``, the
    sums of rows and columns are beside the picture. With ``steps`` ``[C]``, each column belongs to
    a step instead. ``words`` say what the sizes are.
    """

    sizes: Floats
    columns: Floats
    rows: Floats
    across: Ruler
    up: Ruler
    words: str = ""
    labels: Sequence[str] = ()
    margins: bool = False
    steps: Floats | None = None
    readout: Readout = ("", False)

    @property
    def norm(self) -> LogNorm:
        """The scale of the colours."""
        found = self.sizes[self.sizes > 0]
        low, high = (float(found.min()), float(found.max())) if found.size else (1.0, 10.0)
        return LogNorm(low, max(high, 2 * low))


@dataclass(frozen=True)
class Shapes:
    """Shapes on two axes, the first of them behind the others.

    ``key`` explains them, and ``words`` say how to read them. ``equal`` axes have the same unit.
    Of shapes at single steps, ``over_steps`` shows all steps, where there is more room. ``share``
    is that of the width of a panel which also has numbers over the steps; there, the ``title`` says
    what they show besides.
    """

    shapes: tuple[Shape, ...]
    across: Ruler
    up: Ruler
    key: tuple[Entry, ...] = ()
    words: str = ""
    equal: bool = False
    over_steps: Picture | None = None
    share: float = 0.4
    title: str = ""
    readout: Readout = ("", False)


@dataclass(frozen=True)
class Lines:
    """Numbers per step on one value axis.

    ``layers`` are those of layers or parameters, from input to output and all at the same steps,
    behind the ``curves``. ``latest`` is on the right of the title, by default the latest value of a
    single curve; ``words`` say what the numbers are where nothing else does. The ``scale`` is by
    default that of the quantity's view. The axis has room for
    all values and for those of ``room``, or has the ``limits``; if ``spiky``, single values are out
    of its range. It is ``axis`` if that is given. ``levels`` are dashed lines, and what is above
    ``danger`` is tinted. ``shares`` are labelled as percents. If ``named_at_ends``, curves
    have their names on the right where there is room, instead of in a key. Shapes are ``beside``
    the lines where there is room.
    ``message`` says why there is nothing to draw, where the lines don't; with ``single_lines``,
    each of many layers has a line.
    """

    curves: tuple[Curve, ...] = ()
    layers: Mapping[str, Line] = field(default_factory=dict)
    scale: Scale | None = None
    latest: Readout | None = None
    words: str = ""
    spiky: bool = False
    room: tuple[float, ...] = ()
    limits: tuple[float, float] | None = None
    levels: tuple[float, ...] = ()
    danger: Line | None = None
    shares: bool = False
    named_at_ends: bool = False
    beside: Shapes | None = None
    message: str = ""
    single_lines: bool = False
    axis: Ruler | None = None

    @property
    def lines(self) -> list[Line]:
        """All lines."""
        return [*self.layers.values(), *(curve.line for curve in self.curves)]

    @property
    def dashed(self) -> tuple[float, ...]:
        """The heights of dashed lines: the levels, and zero between values below and above it."""
        ends = [end for one in self.curves for spread in one.spreads for end in spread]
        known = np.concatenate([np.array([])] + [one.values for one in (*self.lines, *ends)])
        is_between = bool((known < 0).any() and (known > 0).any())
        return (*self.levels, 0.0) if is_between and 0 not in self.levels else self.levels

    @property
    def why(self) -> str:
        """Why there is nothing to draw, if there is nothing."""
        return self.message or why_empty(self.lines)

    @property
    def finite_curves(self) -> list[Curve]:
        """The curves that aren't ∞ at every step."""
        return [curve for curve in self.curves if not always_infinite(curve.line)]

    @cached_property
    def parts(self) -> tuple[Mapping[str, Line], Mapping[str, Line]]:
        """The lines of layers to draw, and those with zeros; what is always ∞ is in neither."""
        finite = {name: one for name, one in self.layers.items() if not always_infinite(one)}
        return without_zeros(finite, self.scale)

    @property
    def few(self) -> bool:
        """Whether each layer has a line of its own."""
        return self.single_lines or len(self.parts[0]) <= MOST_LINES

    @property
    def readout(self) -> Readout:
        """What is on the right of the title."""
        if self.latest is not None or len(self.curves) != 1:
            return self.latest or ("", False)
        return readout(self.curves[0].line)

    @cached_property
    def layer_curves(self) -> tuple[Curve, ...]:
        """Thin curves of the layers, in a sequence of colours.

        Of more than ``MOST_LINES`` these are the median, the lowest and the highest one, unless
        they are ``single_lines``.
        """
        layers = self.parts[0] or self.layers
        if self.few:
            width = 1.1 if len(layers) <= 8 else 0.7
            named = zip(layers.items(), sequence_colors(len(layers)), strict=True)
            return tuple(Curve(name, line, color, width) for (name, line), color in named)
        low, high = lowest_and_highest(layers)
        least, first, middle, third, most = quantiles(layers, (0, 0.25, 0.5, 0.75, 1))
        return (
            Curve("median", middle, BLUE, 1.4, spreads=((least, most), (first, third))),
            Curve("lowest", layers[low], PURPLE, 0.8),
            Curve("highest", layers[high], ORANGE, 0.8),
        )

    @property
    def all_curves(self) -> tuple[Curve, ...]:
        """The curves, and those of the layers, as a figure shows them."""
        return (*self.curves, *self.layer_curves)

    def up(self, warp: Warp | None = None) -> Ruler:
        """The value axis of what is drawn over the places of steps by ``warp``.

        There is room for the trends of layers, and of the intervals around spiky values for what is
        near the values.
        """
        if self.axis is not None:
            return self.axis
        curves = self.finite_curves
        values = [one.line.values for one in curves]
        layers = [smooth(one.line, warp).values for one in self.layer_curves]
        known = np.concatenate([*values, *layers, np.array([])])
        log = allowed(known[np.isfinite(known)], self.scale or "linear") == "log"
        room = [np.array(self.room)]
        if self.spiky:
            values, layers = [without_spikes(one, log) for one in values], []
        for one, middle in zip(curves, values, strict=True):
            ends = [end.values for spread in one.spreads for end in spread]
            room += [within_reach(end, middle, log) for end in ends] if self.spiky else ends
        found = ruler([*values, *layers, *room], self.scale or "linear")
        low, high = found.limits
        limits = (max(low, 0.0), min(high, 1.0)) if self.shares else (low, high)
        return replace(found, limits=self.limits or limits, shares=self.shares)


@dataclass(frozen=True)
class Map:
    """A number for each layer or parameter over the steps, as colours by ``norm``.

    ``labels`` are those of the rows, and ``words`` say what the numbers are. If there are shapes
    ``beside`` it, their key explains the colours.
    """

    table: LayerTable
    labels: Sequence[str]
    norm: Normalize
    words: str
    shares: bool = False
    readout: Readout = ("", False)
    beside: Shapes | None = None
    colors: Literal["sizes", "signed", "signal"] = "sizes"

    @property
    def has_grey(self) -> bool:
        """Whether there are zeros that the scale of colours doesn't have."""
        return isinstance(self.norm, LogNorm) and bool((self.table.values == 0).any())


@dataclass(frozen=True)
class Drawn:
    """What matplotlib alone draws, on an axis over some steps, and a readout as that of lines."""

    draw: Callable[[Axes, StepAxis], Artists]
    readout: Readout = ("", False)


@dataclass(frozen=True)
class Grid:
    """Small panels by their titles, in at most ``columns``."""

    parts: Mapping[str, Lines | Picture | Shapes]
    words: str
    columns: int = 6
    gap: tuple[float, float] = (16.0, 30.0)
    readout: Readout = ("", False)


Content = Lines | Map | Picture | Shapes | Grid | Drawn


@dataclass(frozen=True, eq=False)
class Panel:
    """A panel as data: its title, its group, and the series that it shows.

    ``label`` is that of its value axis.
    """

    title: str
    group: Group
    names: tuple[str, ...]
    content: Content
    label: str = ""

    @property
    def width(self) -> float:
        """Cells of a figure that suit what there is to draw."""
        shown = self.content
        if isinstance(shown, Grid) or (isinstance(shown, Picture) and shown.labels):
            return 4.0
        if isinstance(shown, (Lines, Map)) and shown.beside is not None:
            return 1.5
        return 2.0 if isinstance(shown, Map) else 1.0

    @property
    def height(self) -> float:
        """Cells; a higher panel would not fit on a usual screen."""
        shown = self.content
        if isinstance(shown, Grid):
            return max(1.0, min(0.25 + 0.5 * math.ceil(len(shown.parts) / shown.columns), 4.25))
        rows = 0 if isinstance(shown, (Lines, Shapes, Drawn)) else len(shown.labels)
        return max(1.0, min(0.5 + 0.25 * math.ceil(rows / 4), 2.5))


def readout(line: Line, name: str = "") -> Readout:
    """The latest value as text, and whether it is an alarm: it isn't finite for no known reason.

    The ``name`` of the value is in front of it.
    """
    if not line.steps.size:
        return "", False
    text = f"{name} {number_label(line.latest)}".lstrip()
    last = line.steps[line.finite]
    if last.size and not line.finite[-1]:
        text += f" since step {line.steps[line.steps > last[-1]][0]:,.0f}"
    return text, bool(line.unexplained[-1])


def any_finite(lines: Sequence[Line]) -> bool:
    """Whether there is anything to draw."""
    return any(bool(line.finite.any()) for line in lines)


def why_empty(lines: Sequence[Line]) -> str:
    """Why there is nothing to draw: the reason of the latest value that has one."""
    reasons = [line.reason for line in lines if line.reason]
    if reasons:
        return reasons[-1]
    if not any(line.steps.size for line in lines):
        return "nothing recorded yet"
    is_infinite = all(always_infinite(line) for line in lines)
    return "infinite at every step" if is_infinite else "recorded, but never a finite number"


def always_infinite(line: Line) -> bool:
    """Whether all values of a line that exist are ∞."""
    return not line.finite.any() and bool(np.isposinf(line.values).any())


ROUNDING = 1e-12
"""Share of the largest value below which a number on a logarithmic axis is rounding error."""


def without_zeros(
    lines: Mapping[str, Line], scale: Scale | None
) -> tuple[Mapping[str, Line], Mapping[str, Line]]:
    """Lines without the zeros that aren't drawn, and the lines that these are in.

    On a logarithmic axis, rounding errors count as zeros, because they would stretch it.
    """
    known = {name: one.values[one.finite] for name, one in lines.items()}
    largest = max((float(values.max()) for values in known.values() if values.size), default=0.0)
    is_log = scale == "log" and not any((values < 0).any() for values in known.values())
    limit = ROUNDING * largest if is_log else 0.0
    dead = [n for n, values in known.items() if values.size and not (np.abs(values) > limit).any()]
    marked = [n for n, values in known.items() if (values <= limit).any()] if is_log else dead
    others = [name for name in lines if name not in dead]
    if not marked or not others:
        return lines, {}
    return (
        {n: _replaced(lines[n], limit, np.nan) if is_log else lines[n] for n in others},
        {n: _replaced(lines[n], limit, 0.0) for n in marked},
    )


def _replaced(line: Line, limit: float, value: float) -> Line:
    """A line with another value where the size of its own is at most ``limit``."""
    values = np.where(np.abs(line.values) <= limit, value, line.values)
    return Line(line.steps, values, line.reason)
