"""Functions for drawing series: curves, their trends, marks of missing values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
from numpy.typing import NDArray

from gradlens.history.lines import Floats, Line
from gradlens.instruments.scales import Scale, StepAxis, fit, number_label
from gradlens.instruments.series import thin, trend
from gradlens.instruments.style import (
    ALARM,
    MUTED,
    Color,
    Entry,
    key,
    message,
    points,
    sequence_colors,
    sequence_key,
    tint,
)

SMOOTH_FROM = 150
MARKERS_UP_TO = 30
ROW = 9.0
"""Points that a row with a label takes, at least."""

Artists = dict[str, Artist]


def curve(
    ax: Axes,
    axis: StepAxis,
    line: Line,
    color: Color,
    name: str,
    z: float = 3,
    width: float = 1.6,
) -> Artists:
    """A main line; of many points, their trend in front of the pale raw values."""
    if line.finite.sum() < SMOOTH_FROM:
        return {name: thread(ax, axis, line, color, width, z)}
    raw = thread(ax, axis, line, tint(color, 0.35), width=0.6, z=2 + 0.01 * z)
    smooth = trend(line, axis.warp)
    (front,) = ax.plot(
        smooth.steps,
        smooth.values,
        color=color,
        linewidth=width,
        zorder=z,
        linestyle="-",
        marker="none",
    )
    return {name: raw, f"{name} trend": front}


def thread(
    ax: Axes, axis: StepAxis, line: Line, color: Color, width: float = 0.9, z: float = 2.5
) -> Artist:
    """A thin line, with markers if there are few values, and on a value between two gaps."""
    steps, values = thin(line.steps, line.values, warp=axis.warp)
    few = np.isfinite(values).sum() <= MARKERS_UP_TO
    marked = np.isfinite(values) if few else _alone(values)
    (artist,) = ax.plot(
        steps,
        values,
        color=color,
        linewidth=width,
        linestyle="-",
        solid_joinstyle="round",
        marker="o",
        markersize=2.2 * width**0.5 + 0.4,
        markeredgewidth=0,
        markevery=np.flatnonzero(marked).tolist(),
        zorder=z,
    )
    return artist


def _alone(values: Floats) -> NDArray[np.bool_]:
    finite = np.isfinite(values)
    before = np.concatenate(([False], finite[:-1]))
    after = np.concatenate((finite[1:], [False]))
    return finite & ~before & ~after


def band(ax: Axes, axis: StepAxis, low: Line, high: Line, color: Color) -> Artist:
    """The area between two lines; of many points, between their trends.

    Call it after ``fit``: values above the range of the axis, even ∞, are drawn up to its top.
    """
    top = 10 * abs(ax.get_ylim()[1])
    edges = [Line(one.steps, np.minimum(one.values, top)) for one in (low, high)]
    if low.finite.sum() >= SMOOTH_FROM:
        edges = [trend(edge, axis.warp, bridge=True) for edge in edges]
    return ax.fill_between(
        edges[0].steps, edges[0].values, edges[1].values, color=tint(color, 0.2), linewidth=0,
        zorder=1.5,
    )  # fmt: skip


def missing(ax: Axes, axis: StepAxis, lines: Sequence[Line]) -> Artists:
    """Marks at steps whose value isn't a finite number.

    Ticks are at the upper edge where the value is ∞, and otherwise on the base line. Lines that are
    always ∞ are shown as one line along the upper edge; ``infinite_entry`` explains it in a key.
    """
    infinite = [line.steps[np.isposinf(line.values)] for line in lines if not always_infinite(line)]
    others = [line.steps[~line.finite & ~np.isposinf(line.values)] for line in lines]
    artists = {
        name: _ticks(ax, axis, np.unique(np.concatenate(steps)), height, color)
        for name, steps, height, color in (
            ("missing", others, 0.0, ALARM),
            ("infinite", infinite, 1.0, MUTED),
        )
        if any(one.size for one in steps)
    }
    return artists | _upper_edge(ax, [line for line in lines if always_infinite(line)])


def _upper_edge(ax: Axes, lines: Sequence[Line]) -> Artists:
    if not lines:
        return {}
    steps = np.unique(np.concatenate([line.steps[np.isposinf(line.values)] for line in lines]))
    (artist,) = ax.plot(
        steps[[0, -1]],
        [1.0, 1.0],
        transform=ax.get_xaxis_transform(),
        color=MUTED,
        linewidth=1.6,
        linestyle="-",
        marker="o",
        markersize=3,
        markeredgewidth=0,
        clip_on=False,
        zorder=4,
    )
    return {"always infinite": artist}


def _ticks(ax: Axes, axis: StepAxis, steps: Floats, height: float, color: Color) -> Artist:
    shown, _ = thin(steps, np.zeros_like(steps), warp=axis.warp)
    (artist,) = ax.plot(
        shown,
        np.full_like(shown, height),
        transform=ax.get_xaxis_transform(),
        color=color,
        linestyle="none",
        marker="|",
        markersize=4,
        markeredgewidth=1.0,
        clip_on=False,
        zorder=4,
    )
    return artist


def zero_line(ax: Axes) -> Artists:
    """A dashed line at zero if the value axis extends to both sides of it."""
    low, high = ax.get_ylim()
    if not low < 0 < high:
        return {}
    return {"zero": ax.axhline(0, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)}


def explain_empty(ax: Axes, lines: Sequence[Line]) -> Artists:
    """A message why there is nothing to draw: the reason of the latest value that has one."""
    reasons = [line.reason for line in lines if line.reason]
    nothing = "recorded, but never a finite number"
    if not any(line.steps.size for line in lines):
        nothing = "nothing recorded yet"
    elif all(always_infinite(line) for line in lines):
        nothing = "infinite at every step"
    return {"message": message(ax, reasons[-1] if reasons else nothing)}


def always_infinite(line: Line) -> bool:
    """Whether all values of a line that exist are ∞."""
    return not line.finite.any() and bool(np.isposinf(line.values).any())


def infinite_entry(names: Sequence[str]) -> list[Entry]:
    """The entry of a key for lines that are always ∞, if there are any."""
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    return [Entry(f"∞: {names[0]}{more}", MUTED)] if names else []


def any_finite(lines: Sequence[Line]) -> bool:
    """Whether there is anything to draw."""
    return any(bool(line.finite.any()) for line in lines)


def readout(line: Line) -> tuple[str, bool]:
    """The latest value as text, and whether it is an alarm because it isn't finite."""
    if not line.steps.size:
        return "", False
    if line.finite[-1]:
        return number_label(line.latest), False
    last = line.steps[line.finite]
    if not last.size:
        return number_label(line.latest), True
    since = line.steps[line.steps > last[-1]][0]
    return f"{number_label(line.latest)} since step {since:,.0f}", True


def curves(
    ax: Axes,
    axis: StepAxis,
    lines: Mapping[str, Line],
    colors: Sequence[Color],
    scale: Scale,
    widths: Sequence[float] = (),
    head: Axes | None = None,
) -> Artists:
    """Several main lines on one value axis, explained by a key above it or above ``head``.

    Lines that are ∞ at every step are named in the key.
    """
    axis.apply(ax)
    if not any_finite(list(lines.values())):
        return explain_empty(ax, list(lines.values()))
    artists: Artists = {}
    entries: list[Entry] = []
    styled = zip(lines.items(), colors, widths or [1.6] * len(lines), strict=True)
    for place, ((name, line), color, width) in enumerate(styled):
        if not always_infinite(line):
            artists |= curve(ax, axis, line, color, name, 3 + place, width)
            entries.append(Entry(name, color))
    fit(ax, [line.values for line in lines.values()], scale)
    if len(lines) > 1:
        infinite = [name for name, line in lines.items() if always_infinite(line)]
        shown = key(head or ax, [*entries, *infinite_entry(infinite)])
        artists |= {"key": shown} if shown else {}
    return artists | missing(ax, axis, list(lines.values()))


def threads(
    ax: Axes,
    axis: StepAxis,
    lines: Mapping[str, Line],
    scale: Scale,
    front: Mapping[str, tuple[Line, Color]] | None = None,
) -> Artists:
    """Many thin lines coloured from input to output, behind the lines of ``front``.

    Lines of many points are drawn as trends only, because their raw values would cover each other.
    Lines that are ∞ at every step are named in the key.
    """
    front = front or {}
    axis.apply(ax)
    drawn = [*lines.values(), *(line for line, _ in front.values())]
    if not any_finite(drawn):
        return explain_empty(ax, drawn)
    infinite = [name for name, line in lines.items() if always_infinite(line)]
    lines = {name: line for name, line in lines.items() if name not in infinite}
    artists: Artists = {}
    width = 1.1 if len(lines) <= 8 else 0.7
    for (name, line), color in zip(lines.items(), sequence_colors(len(lines)), strict=True):
        many = line.finite.sum() >= SMOOTH_FROM
        artists[name] = thread(ax, axis, trend(line, axis.warp) if many else line, color, width)
    for name, (line, shade) in front.items():
        artists |= curve(ax, axis, line, shade, name, z=5)
    fit(ax, [np.asarray(one.get_ydata()) for one in ax.get_lines()], scale)
    first = [Entry(name, shade) for name, (_, shade) in front.items()]
    shown = sequence_key(ax, list(lines), [*first, *infinite_entry(infinite)])
    artists |= {"key": shown} if shown else {}
    return artists | missing(ax, axis, drawn)


def row_stride(count: int, height: float) -> int:
    """The least n for which each n-th of ``count`` rows on ``height`` points can have a label."""
    return max(1, math.ceil(points(ROW) * count / height))


def label_rows(ax: Axes, labels: Sequence[str], stride: int, count: int) -> None:
    """Set the value axis to ``count`` rows, the first on top, and label each ``stride``-th."""
    ax.set_yscale("linear")
    ax.set_ylim(count, 0)
    ax.set_ylabel("")
    ax.grid(visible=False)
    ax.yaxis.set_major_locator(FixedLocator([row + 0.5 for row in range(0, count, stride)]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FixedFormatter(labels))
