"""Functions for drawing series: curves, their trends, marks of missing values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
from numpy.typing import NDArray

from gradlens.history.lines import Floats, Line
from gradlens.instruments.panel import Artists, Curve, LineStyle, always_infinite
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.series import SMOOTH_FROM, ends_of_area, thin, trend
from gradlens.instruments.style import (
    ALARM,
    MUTED,
    TICK_SIZE,
    Color,
    inside,
    message,
    points,
    shorten_apart,
    size_in_points,
    text_width,
    tint,
)

MARKERS_UP_TO = 30
ARROWS = 40
"""Largest number of arrows along an edge."""
LEAST_SERIES = 60.0
"""Points below which a series beside a picture can't be read."""
NARROWEST = 75.0
"""Points of a small panel and the gap beside it, at least."""
ROW = 9.0
"""Points that a row with a label takes, at least."""


def curve(ax: Axes, axis: StepAxis, shown: Curve, z: float = 3) -> Artists:
    """A main line; of many points, their trend in front of the pale raw values."""
    line, style = shown.line, shown.style or "-"
    if line.finite.sum() < SMOOTH_FROM:
        return {shown.name: thread(ax, axis, line, shown.color, shown.width, z, style)}
    front_line = trend(line, axis.warp, bridge=True)
    (front,) = ax.plot(
        front_line.steps,
        front_line.values,
        color=shown.color,
        linewidth=shown.width,
        zorder=z,
        linestyle=style,
        marker="none",
    )
    raw = thread(ax, axis, line, tint(shown.color, 0.35), width=0.6, z=2 + 0.01 * z)
    return {shown.name: raw, f"{shown.name} trend": front}


def thread(
    ax: Axes,
    axis: StepAxis,
    line: Line,
    color: Color,
    width: float = 0.9,
    z: float = 2.5,
    style: LineStyle = "-",
) -> Artist:
    """A thin line, with markers if there are few values, and on a value between two gaps."""
    steps, values = thin(line.steps, line.values, warp=axis.warp)
    few = np.isfinite(values).sum() <= MARKERS_UP_TO
    marked = np.isfinite(values) if few else alone(values)
    (artist,) = ax.plot(
        steps,
        values,
        color=color,
        linewidth=width,
        linestyle=style,
        solid_joinstyle="round",
        marker="o",
        markersize=2.2 * width**0.5 + 0.4,
        markeredgewidth=0,
        markevery=np.flatnonzero(marked).tolist(),
        zorder=z,
    )
    return artist


def alone(values: Floats) -> NDArray[np.bool_]:
    finite = np.isfinite(values)
    before = np.concatenate(([False], finite[:-1]))
    after = np.concatenate((finite[1:], [False]))
    return finite & ~before & ~after


def band(ax: Axes, axis: StepAxis, low: Line, high: Line, color: Color) -> Artist:
    """The area between two lines; of many points, between their trends.

    Call it after ``fit``: values above the range of the axis, even ∞, are drawn up to its top.
    """
    first, last = ends_of_area(low, high, 10 * abs(ax.get_ylim()[1]), axis.warp)
    return ax.fill_between(
        first.steps, first.values, last.values, color=tint(color, 0.2), linewidth=0, zorder=1.5
    )


def missing(ax: Axes, axis: StepAxis, lines: Sequence[Line]) -> Artists:
    """Marks at steps whose value isn't a finite number.

    Ticks are at the upper edge where the value is ∞, and otherwise on the base line. Lines that are
    always ∞ are shown as one line along the upper edge.
    """
    infinite = [line.steps[np.isposinf(line.values)] for line in lines if not always_infinite(line)]
    others = [line.steps[~line.finite & ~np.isposinf(line.values)] for line in lines]
    artists: Artists = {}
    for name, found, height, color in (
        ("missing", others, 0.0, ALARM), ("infinite", infinite, 1.0, MUTED)
    ):  # fmt: skip
        if any(one.size for one in found):
            steps = np.unique(np.concatenate(found))
            shown, _ = thin(steps, np.zeros_like(steps), warp=axis.warp)
            look = {"marker": "|", "markersize": 4, "markeredgewidth": 1.0, "linestyle": "none"}
            artists[name] = at_height(ax, shown, height, color, **look)
    always = [line.steps[np.isposinf(line.values)] for line in lines if always_infinite(line)]
    if always:
        steps = np.unique(np.concatenate(always))[[0, -1]]
        artists["always infinite"] = at_height(ax, steps, 1.0, MUTED, linewidth=1.6, markersize=3)
    return artists


def at_height(ax: Axes, steps: Floats, height: Floats | float, color: Color, **look: Any) -> Artist:
    """Marks at steps, or a line, at a height from 0 on the base line to 1 on the upper edge."""
    usual: dict[str, Any] = {"linestyle": "-", "marker": "o", "markeredgewidth": 0, "zorder": 4}
    (artist,) = ax.plot(
        steps,
        np.broadcast_to(height, steps.shape),
        transform=ax.get_xaxis_transform(),
        color=color,
        clip_on=False,
        **usual | look,
    )
    return artist


def beyond(ax: Axes, axis: StepAxis, lines: Sequence[Line]) -> Artists:
    """Arrows at the edges of a panel where finite values are out of its range.

    Call it after ``fit``.
    """
    low, high = ax.get_ylim()
    above = [line.steps[line.finite & (line.values > high)] for line in lines]
    below = [line.steps[line.finite & (line.values < low)] for line in lines]
    ends = axis.warp(np.array([axis.low, axis.high]))
    artists: Artists = {}
    for name, found, height, marker in (("above", above, 1.0, "^"), ("below", below, 0.0, "v")):
        if any(one.size for one in found):
            shown = _apart(axis.warp(np.unique(np.concatenate(found))), ends)
            look = {"marker": marker, "markersize": 3.5, "linestyle": "none"}
            artists[name] = at_height(ax, axis.unwarp(shown), height, MUTED, **look)
    return artists


def _apart(places: Floats, ends: Floats) -> Floats:
    """One place of each part of an axis that is as wide as an arrow."""
    part = (ends[1] - ends[0]) / ARROWS or 1.0
    _, first = np.unique(np.floor((places - ends[0]) / part), return_index=True)
    return places[first]


def zero_line(ax: Axes) -> Artists:
    """A dashed line at zero if the value axis extends to both sides of it."""
    low, high = ax.get_ylim()
    if not low < 0 < high:
        return {}
    return {"zero": ax.axhline(0, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)}


def explain_empty(ax: Axes, lines: Sequence[Line], why: str = "") -> Artists:
    """A message why there is nothing to draw: the reason of the latest value that has one."""
    return {"message": message(ax, why or why_empty(lines))}


def why_empty(lines: Sequence[Line]) -> str:
    """Why there is nothing to draw: the reason of the latest value that has one."""
    reasons = [line.reason for line in lines if line.reason]
    nothing = "recorded, but never a finite number"
    if not any(line.steps.size for line in lines):
        nothing = "nothing recorded yet"
    elif all(always_infinite(line) for line in lines):
        nothing = "infinite at every step"
    return reasons[-1] if reasons else nothing


def picture_and_series(ax: Axes, share: float, gap: float) -> tuple[Axes | None, Axes]:
    """Axes of a picture, which takes a ``share`` of the width, and of a series on its right.

    ``gap`` is between them, in points. Where the series has no room beside a picture, there is
    none, and the series has the whole axis.
    """
    width = size_in_points(ax)[0]
    left = share + points(gap) / width
    if (1 - left) * width < points(LEAST_SERIES):
        return None, ax
    return inside(ax, 0, 0, share, 1), inside(ax, left, 0, 1 - left, 1)


def row_stride(count: int, height: float) -> int:
    """The least n for which each n-th of ``count`` rows on ``height`` points can have a label."""
    return max(1, math.ceil(points(ROW) * count / height))


def labelled_rows(ax: Axes, names: Sequence[str], right: float = 0.0) -> Axes:
    """An axis inside another one for rows with names on the left, ``right`` points narrower."""
    width, height = size_in_points(ax)
    stride = row_stride(len(names), height)
    labels = shorten_apart(names[::stride], 0.3 * width, TICK_SIZE)
    left = max(0.0, max(text_width(label, TICK_SIZE) for label in labels) - points(24)) / width
    inner = inside(ax, left, 0, 1 - left - points(right) / width, 1)
    label_rows(inner, labels, stride, len(names))
    return inner


def label_rows(ax: Axes, labels: Sequence[str], stride: int, count: int) -> None:
    """Set the value axis to ``count`` rows, the first on top, and label each ``stride``-th."""
    ax.set_yscale("linear")
    ax.set_ylim(count, 0)
    ax.set_ylabel("")
    ax.grid(visible=False)
    ax.yaxis.set_major_locator(FixedLocator([row + 0.5 for row in range(0, count, stride)]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FixedFormatter(labels))


def apart(places: Floats, gap: float, end: float) -> Floats:
    """Ascending places, moved to be ``gap`` apart and half a gap from 0 and from ``end``.

    Those that have no room are moved beyond 0.
    """
    shares = gap * np.arange(len(places))
    upwards = np.maximum.accumulate(np.maximum(places, gap / 2) - shares) + shares
    limits = end - gap / 2 - shares[::-1]
    return np.asarray(np.minimum(upwards, limits), dtype=np.float64)


def small_panels(ax: Axes, count: int, columns: int, gap: tuple[float, float]) -> list[Axes]:
    """Axes in rows of at most ``columns``, with a ``gap`` in points between them, across and up."""
    across, up = size_in_points(ax)
    columns = max(1, min(columns, int(across / points(NARROWEST))))
    rows = math.ceil(count / columns)
    columns = math.ceil(count / rows)
    gap_x, gap_y, head = points(gap[0]) / across, points(gap[1]) / up, points(16) / up
    width = (1 - gap_x * (columns - 1)) / columns
    height = max((1 - head - gap_y * (rows - 1)) / rows, 0.2 / rows)
    places = [(number % columns, number // columns) for number in range(count)]
    return [
        inside(ax, x * (width + gap_x), 1 - head - height - y * (height + gap_y), width, height)
        for x, y in places
    ]
