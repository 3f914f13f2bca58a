"""The loss along a line and on a plane, and their figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from gradlens.history.lines import Floats, Line
from gradlens.instruments.axes import LABELLED, Drawing, plot_panels
from gradlens.instruments.curves import explain_empty, missing
from gradlens.instruments.panel import Artists, Drawn, Panel
from gradlens.instruments.scales import (
    NumberLabels,
    Ruler,
    StepAxis,
    fit,
    log_if_far,
    log_if_wide,
    number_label,
)
from gradlens.instruments.shapes import BAR, colour_bar, label_below
from gradlens.instruments.style import (
    ALARM,
    BLUE,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    SEQUENCE,
    SMALLEST_SIZE,
    TICK_SIZE,
    Entry,
    inside,
    key,
    points,
    shorten,
    size_in_points,
    subtitle,
)

DASHES = (0, (3.0, 1.5))


@dataclass(frozen=True)
class LossLine:
    """The mean loss along a direction: ``losses`` ``[K]`` at ``distances`` ``[K]`` from the origin.

    Losses may be NaN or infinite. ``loss`` is that at the origin, and ``slope`` and ``curvature``
    are its first and second derivative along the direction there, for a distance of one; an
    ``Undefined`` says why there is none. ``axis`` says what the direction and its unit are.
    """

    distances: Floats
    losses: Floats
    axis: str
    loss: float
    slope: float
    curvature: float

    @property
    def parabola(self) -> Floats:
        """loss + slope·a + curvature·a²/2 at the distances a, ``[K]``; NaN where one is missing."""
        a = self.distances
        return self.loss + self.slope * a + self.curvature * a**2 / 2

    def plot(self, ax: Axes | None = None) -> Drawing:
        """Draw the losses, the parabola and the origin on ``ax``, or on a new figure.

        The key has the parabola's slope and curvature. The axis is logarithmic if the largest loss
        is over 30 times the smallest. Red ticks on the base line are at NaNs, grey ones at the top
        at infinite losses.
        """
        return _plot(ax, "Loss along a line", self.loss, self._draw)

    def _draw(self, ax: Axes) -> Artists:
        one = Line(self.distances, self.losses)
        low, high = float(self.distances[0]), float(self.distances[-1])
        pad = 0.015 * (high - low)
        Ruler("", (low - pad, high + pad)).apply(ax, across=True)
        label_axes(ax, self.axis, "mean loss")
        if not one.finite.any():
            return explain_empty(ax, [one])
        fit(ax, [self.losses], log_if_wide([self.losses]))
        (front,) = ax.plot(self.distances, self.losses, color=BLUE, linewidth=1.6, zorder=4)
        artists: Artists = {"losses": front}
        entries = [Entry("loss", BLUE)]
        if np.isfinite(self.parabola).any():
            look: dict[str, Any] = {"linewidth": 1.2, "linestyle": DASHES, "zorder": 3}
            (dashed,) = ax.plot(self.distances, self.parabola, color=ORANGE, **look)
            artists["parabola"] = dashed
            slope, curvature = number_label(self.slope, 2), number_label(self.curvature, 2)
            entries.append(Entry(f"slope {slope}, curvature {curvature}", ORANGE, "dashed"))
        (point,) = ax.plot(
            [0], [self.loss], "o", color=INK, markersize=5, markeredgecolor=PAPER, zorder=5
        )
        artists |= {"origin": point} | missing(ax, StepAxis(low, high), [one])
        marks = {"NaN": (self.losses != self.losses, ALARM), "∞": (np.isinf(self.losses), MUTED)}
        entries += [Entry(name, color, "thin") for name, (at, color) in marks.items() if at.any()]
        explained = key(ax, entries)
        return artists | ({"key": explained} if explained else {})


SHADES, LINES = 24, 8
"""Shades of the map, and contour lines, of which there may be one more or less."""

WIDE = 5.0
"""Ratio of the largest to the smallest loss from which levels are logarithmic.

Lower than for the axis of a line, since equal steps of colours leave the valley without structure.
"""


@dataclass(frozen=True)
class LossPlane:
    """The mean loss on a plane: ``losses`` ``[A, B]`` at ``first`` ``[A]`` and ``second`` ``[B]``.

    Both are distances from the origin along the two directions, which ``axes`` are the labels of.
    Losses may be NaN or infinite. ``loss`` is that at the origin. ``path`` ``[T, 2]`` are the
    projections of a trajectory on the plane, and ``in_plane`` is the share of the trajectory's
    squared distances from the origin that is in the plane, NaN without a trajectory: the lower it
    is, the less the map says about the losses that training has seen.
    """

    first: Floats
    second: Floats
    losses: Floats
    axes: tuple[str, str]
    loss: float
    path: Floats
    in_plane: float

    def plot(self, ax: Axes | None = None) -> Drawing:
        """Draw a map with contours, the origin and the trajectory on ``ax``, or on a new figure.

        Levels are logarithmic if the largest loss is over 5 times the smallest. The map is hatched
        next to points without a finite loss, which are marked by crosses.
        """
        return _plot(ax, "Loss on a plane", self.loss, self._draw)

    def _draw(self, ax: Axes) -> Artists:
        finite = np.isfinite(self.losses)
        if not finite.any():
            ax.set_xticks([])
            return explain_empty(ax, [Line(self.first, self.losses[:, 0])])
        inner, bar = _axes(ax)
        Ruler("", (self.first[0], self.first[-1])).apply(inner, across=True)
        Ruler("", (self.second[0], self.second[-1])).apply(inner)
        inner.grid(visible=False)
        label_axes(inner, *self.axes)
        artists, norm = self._map(inner, bar)
        if not finite.all():
            artists |= self._undefined(inner, ~finite)
        artists |= self._marks(inner)
        parts = [f"colour: mean loss{'' if type(norm) is Normalize else ', log'}"]
        parts += [] if finite.all() else ["hatched: no finite number"]
        if len(self.path):
            parts.append(f"path: {100 * self.in_plane:.0f} % in the plane")
        return artists | {"subtitle": subtitle(ax, " · ".join(parts))}

    def _map(self, ax: Axes, bar: Axes) -> tuple[Artists, Normalize]:
        norm = loss_norm(self.losses)
        shades, rounded = levels(norm)
        grid = (self.first, self.second, np.ma.masked_invalid(self.losses.T))
        filled = ax.contourf(*grid, shades, norm=norm, cmap=SEQUENCE)
        lines = ax.contour(*grid, rounded, colors=PAPER, linewidths=0.6, alpha=0.7)
        labels = ax.clabel(lines, fmt=number_label, fontsize=SMALLEST_SIZE)
        artists: Artists = {"map": filled, "contours": lines}
        artists |= {f"level {label.get_text()}": label for label in labels}
        return artists | {"colours": colour_bar(bar, filled, norm, NumberLabels())}, norm

    def _undefined(self, ax: Axes, where: NDArray[np.bool_]) -> Artists:
        """Hatches behind the map, which ends there, and a cross at each point without a number."""
        behind = Rectangle(
            (0, 0), 1, 1, transform=ax.transAxes, facecolor=PAPER, edgecolor=ALARM, hatch="/////",
            linewidth=0, zorder=0,
        )  # fmt: skip
        places = np.argwhere(where)
        (crosses,) = ax.plot(
            self.first[places[:, 0]], self.second[places[:, 1]], "x", color=ALARM, markersize=3
        )
        return {"hatches": ax.add_artist(behind), "undefined": crosses}

    def _marks(self, ax: Axes) -> Artists:
        artists: Artists = {}
        outline = [Stroke(linewidth=2.6, foreground=INK), Normal()]
        if len(self.path):
            (line,) = ax.plot(
                *self.path.T, color=PAPER, linewidth=1.2, marker="o", markersize=2.6, zorder=4,
                path_effects=outline,
            )  # fmt: skip
            artists["path"] = line
        (point,) = ax.plot(
            [0], [0], "*", color=ORANGE, markersize=11, markeredgecolor=PAPER, zorder=5
        )
        return artists | {"origin": point}


def loss_norm(losses: Floats) -> Normalize:
    """The scale of colours and levels of finite losses, which may have one sign or both."""
    found = losses[np.isfinite(losses)]
    low, high = float(found.min()), float(found.max())
    if not low < high:
        return Normalize(low - 0.5, high + 0.5)
    if low > 0:
        return LogNorm(low, high) if high > WIDE * low else Normalize(low, high)
    if log_if_far([found]) == "linear":
        return Normalize(low, high)
    return SymLogNorm(float(np.median(np.abs(found))), vmin=low, vmax=high, base=10)


def levels(norm: Normalize) -> tuple[Floats, Floats]:
    """The limits of shades, equally far apart on the scale, and round numbers for lines."""
    low, high = norm.vmin, norm.vmax
    assert low is not None
    assert high is not None
    between = np.asarray(norm.inverse(np.linspace(0, 1, SHADES + 1)), np.float64)[1:-1]
    if type(norm) is Normalize:
        rounded = np.asarray(MaxNLocator(LINES, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high))
    else:
        rounded = np.unique([float(f"{level:.1g}") for level in between[:: SHADES // LINES]])
    inside_range = (low < rounded) & (rounded < high)
    return np.array([low, *between, high]), rounded[inside_range]


def _axes(ax: Axes) -> tuple[Axes, Axes]:
    """An axis for the map, and one for the colours."""
    width, _ = size_in_points(ax)
    bar = inside(ax, 1 - points(BAR[1] - 8) / width, 0, points(BAR[0]) / width, 1)
    return inside(ax, 0, 0, 1 - points(BAR[1]) / width, 1), bar


def _plot(ax: Axes | None, heading: str, loss: float, draw: Callable[[Axes], Artists]) -> Drawing:
    """What ``draw`` draws on an axis, or on a new figure, under a heading with the loss at 0."""
    content = Drawn(lambda ax, _: draw(ax), (f"{number_label(loss)} at 0", False))
    panel = Panel(heading, "curvature", (), content)
    return plot_panels([panel], StepAxis(0, 1), ax, zoom=1.5, margin=LABELLED)


def label_axes(ax: Axes, below: str, left: str) -> None:
    """Labels of the axes, with their middles left out where there is no room.

    That below the axis ends on the right, and may begin left of the axis.
    """
    label_below(ax, below)
    shown = shorten(left, size_in_points(ax)[1], TICK_SIZE)
    ax.set_ylabel(shown, fontsize=TICK_SIZE, color=MUTED, labelpad=2)
