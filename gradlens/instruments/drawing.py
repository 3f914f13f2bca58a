"""Functions for drawing series: curves, their trends, marks of missing values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
from numpy.typing import NDArray

from gradlens.history.lines import Floats, Line
from gradlens.instruments.overlaps import separate
from gradlens.instruments.scales import Scale, StepAxis, fit, number_label
from gradlens.instruments.series import thin, trend
from gradlens.instruments.style import (
    ALARM,
    AMBER,
    BLUE,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    SMALLEST_SIZE,
    Color,
    Entry,
    figure_of,
    inside,
    key,
    message,
    points,
    sequence_colors,
    sequence_key,
    shorten,
    size_in_points,
    text_width,
    tint,
)

SMOOTH_FROM = 150
MARKERS_UP_TO = 30
MOST_LINES = 12
"""Largest number of lines that can be told apart."""
QUANTILES = 2000
"""Steps at which quantiles are computed, at most: far more than a panel shows."""
ARROWS = 40
"""Largest number of arrows along an edge."""
LEAST_SERIES = 60.0
"""Points below which a series beside a picture can't be read."""
ROW = 9.0
"""Points that a row with a label takes, at least."""

Artists = dict[str, Artist]
LineStyle = str | tuple[float, tuple[float, ...]]
Side = Literal["top", "bottom"]
"""Of a text: which of its edges is at a line."""
DASHED: LineStyle = (0, (3.0, 1.5))


def curve(
    ax: Axes,
    axis: StepAxis,
    line: Line,
    color: Color,
    name: str,
    z: float = 3,
    width: float = 1.6,
    style: LineStyle = "-",
) -> Artists:
    """A main line; of many points, their trend in front of the pale raw values."""
    if line.finite.sum() < SMOOTH_FROM:
        return {name: thread(ax, axis, line, color, width, z, style)}
    raw = thread(ax, axis, line, tint(color, 0.35), width=0.6, z=2 + 0.01 * z)
    smooth = trend(line, axis.warp)
    (front,) = ax.plot(
        smooth.steps,
        smooth.values,
        color=color,
        linewidth=width,
        zorder=z,
        linestyle=style,
        marker="none",
    )
    return {name: raw, f"{name} trend": front}


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
    marked = np.isfinite(values) if few else _alone(values)
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


def beyond(ax: Axes, axis: StepAxis, lines: Sequence[Line]) -> Artists:
    """Arrows at the edges of a panel where finite values are out of its range.

    Call it after ``fit``.
    """
    low, high = ax.get_ylim()
    above = [line.steps[line.finite & (line.values > high)] for line in lines]
    below = [line.steps[line.finite & (line.values < low)] for line in lines]
    return {
        name: _arrows(ax, axis, np.unique(np.concatenate(steps)), height, marker)
        for name, steps, height, marker in (("above", above, 1.0, "^"), ("below", below, 0.0, "v"))
        if any(one.size for one in steps)
    }


def _arrows(ax: Axes, axis: StepAxis, steps: Floats, height: float, marker: str) -> Artist:
    shown = _apart(axis.warp(steps), axis.warp(np.array([axis.low, axis.high])))
    (artist,) = ax.plot(
        axis.unwarp(shown),
        np.full_like(shown, height),
        transform=ax.get_xaxis_transform(),
        color=MUTED,
        linestyle="none",
        marker=marker,
        markersize=3.5,
        markeredgewidth=0,
        clip_on=False,
        zorder=4,
    )
    return artist


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


def always_zero(line: Line) -> bool:
    """Whether all values of a line that are finite numbers are exactly zero."""
    found = line.values[line.finite]
    return bool(found.size) and not found.any()


def zero_entry(lines: Mapping[str, Line], total: int) -> list[Entry]:
    """The entry of a key for those of all lines that end in exact zeros, if there are any."""
    names = [n for n, one in lines.items() if one.finite.any() and not one.values[one.finite][-1]]
    if not names:
        return []
    which = f"zero: {names[0]}" if len(names) == 1 else f"zero: {len(names)} of {total}"
    return [Entry(which, AMBER)]


def zero_floor(ax: Axes, lines: Sequence[Line]) -> Artists:
    """A thick line where a logarithmic axis or zero begins, over the steps with exact zeros.

    All lines are at the same steps. Call it after ``fit``.
    """
    steps = lines[0].steps
    is_zero = np.any([line.values == 0 for line in lines], axis=0)
    if not is_zero.any():
        return {}
    low, high = ax.get_ylim()
    height = -low / (high - low) if ax.get_yscale() == "linear" and low < 0 < high else 0.0
    heights = np.where(is_zero, height, np.nan)
    shown = thin(steps, heights)
    (artist,) = ax.plot(
        *shown,
        transform=ax.get_xaxis_transform(),
        color=AMBER,
        linewidth=2.6,
        linestyle="-",
        solid_capstyle="butt",
        marker="s",
        markersize=2.6,
        markeredgewidth=0,
        markevery=np.flatnonzero(_alone(shown[1])).tolist(),
        clip_on=False,
        zorder=3.8,
    )
    return {"zeros": artist}


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
    styles: Sequence[LineStyle] = (),
    shown: Sequence[Floats] | None = None,
) -> Artists:
    """Several main lines on one value axis, explained by a key above it or above ``head``.

    Lines that are ∞ at every step are named in the key. The axis has room for the values ``shown``,
    by default for all; arrows are where others are.
    """
    axis.apply(ax)
    if not any_finite(list(lines.values())):
        return explain_empty(ax, list(lines.values()))
    artists: Artists = {}
    fronts: dict[str, Line2D] = {}
    styled = zip(
        lines.items(),
        widths or [1.6] * len(lines),
        styles or ["-"] * len(lines),
        colors,
        strict=True,
    )
    for place, ((name, line), width, style, color) in enumerate(styled):
        if not always_infinite(line):
            drawn = curve(ax, axis, line, color, name, 3 + place, width, style)
            artists |= drawn
            fronts[name] = _line_of(drawn)
    every = list(lines.values())
    fit(ax, [line.values for line in every] if shown is None else shown, scale)
    if not styles:
        separate(ax, [*fronts.values()])
    if len(lines) > 1:
        by_name = dict(zip(lines, colors, strict=True))
        entries = [
            Entry(name, by_name[name], "dashed" if front.is_dashed() else "line")
            for name, front in fronts.items()
        ]
        infinite = [name for name, line in lines.items() if always_infinite(line)]
        explained = key(head or ax, [*entries, *infinite_entry(infinite)])
        artists |= {"key": explained} if explained else {}
    return artists | missing(ax, axis, every) | (beyond(ax, axis, every) if shown else {})


def _line_of(drawn: Artists) -> Line2D:
    """The last of what has been drawn for a line, which is in front."""
    front = [*drawn.values()][-1]
    assert isinstance(front, Line2D)
    return front


def threads(
    ax: Axes,
    axis: StepAxis,
    lines: Mapping[str, Line],
    scale: Scale,
    front: Mapping[str, tuple[Line, Color]] | None = None,
    single_lines: bool = False,
) -> Artists:
    """Thin lines from input to output, all at the same steps, behind the lines of ``front``.

    Lines of many points are drawn as trends only, because their raw values would cover each other.
    Of more lines than ``MOST_LINES`` there are quantiles, and the names of the highest and the
    lowest one, unless ``single_lines``. Lines that are ∞ at every step, and those that end in exact
    zeros, are named or counted in the key. Zeros aren't on a logarithmic axis: a thick line is at
    its base where there are any.
    """
    front = front or {}
    axis.apply(ax)
    drawn = [*lines.values(), *(line for line, _ in front.values())]
    if not any_finite(drawn):
        return explain_empty(ax, drawn)
    infinite = [name for name, line in lines.items() if always_infinite(line)]
    finite = {name: line for name, line in lines.items() if name not in infinite}
    shown, zeros = _without_zeros(finite, scale)
    few = single_lines or len(shown) <= MOST_LINES
    artists = _single(ax, axis, shown) if few else _quantiles(ax, axis, shown)
    for name, (line, shade) in front.items():
        artists |= curve(ax, axis, line, shade, name, z=5)
    fit(ax, [np.asarray(one.get_ydata()) for one in ax.get_lines()], scale)
    first = [Entry(name, shade) for name, (_, shade) in front.items()]
    more = [*zero_entry(zeros, len(lines)), *infinite_entry(infinite)]
    if few:
        explained = sequence_key(ax, list(shown), [*first, *more])
    else:
        artists |= _areas(ax, axis, shown) | _extremes(ax, axis, shown)
        explained = key(ax, [*first, Entry(f"median of {len(shown)}", BLUE), *more, *AREAS])
    artists |= {"key": explained} if explained else {}
    artists |= zero_floor(ax, list(zeros.values())) if zeros else {}
    return artists | missing(ax, axis, drawn)


def _without_zeros(
    lines: Mapping[str, Line], scale: Scale
) -> tuple[Mapping[str, Line], Mapping[str, Line]]:
    """Lines without the zeros that aren't drawn, and the lines that these are in."""
    is_log = scale == "log" and not any((one.values < 0).any() for one in lines.values())
    if is_log:
        zeros = {name: one for name, one in lines.items() if (one.values == 0).any()}
    else:
        zeros = {name: one for name, one in lines.items() if always_zero(one)}
    others = {name: one for name, one in lines.items() if not always_zero(one)}
    if not zeros or not others:
        return lines, {}
    if is_log:
        others = {
            name: Line(one.steps, np.where(one.values == 0, np.nan, one.values), one.reason)
            for name, one in others.items()
        }
    return others, zeros


def _single(ax: Axes, axis: StepAxis, lines: Mapping[str, Line]) -> Artists:
    width = 1.1 if len(lines) <= 8 else 0.7
    return {
        name: thread(ax, axis, smooth(axis, line), color, width)
        for (name, line), color in zip(lines.items(), sequence_colors(len(lines)), strict=True)
    }


def smooth(axis: StepAxis, line: Line, bridge: bool = False) -> Line:
    """The trend of a line of many points, with ``bridge`` across gaps; another line as it is."""
    return trend(line, axis.warp, bridge=bridge) if line.finite.sum() >= SMOOTH_FROM else line


AREAS = (Entry("quartiles", tint(BLUE, 0.3), "box"), Entry("all", tint(BLUE, 0.12), "box"))


def _quantiles(ax: Axes, axis: StepAxis, lines: Mapping[str, Line]) -> Artists:
    """The median, and thin lines of the lowest and the highest line."""
    middle = quantiles(lines, (0.5,))[0]
    low, high = _lowest_and_highest(lines)
    return {
        "median": thread(ax, axis, smooth(axis, middle), BLUE, 1.4, 5),
        "lowest": thread(ax, axis, smooth(axis, lines[low]), PURPLE, 0.8, 4),
        "highest": thread(ax, axis, smooth(axis, lines[high]), ORANGE, 0.8, 4),
    }


def quantiles(lines: Mapping[str, Line], shares: Sequence[float]) -> list[Line]:
    """Quantiles over the lines that have a number, at ``QUANTILES`` of the steps at most."""
    steps = next(iter(lines.values())).steps
    kept = np.unique(np.linspace(0, steps.size - 1, QUANTILES).round().astype(np.int64))
    table = np.array([one.values[kept] for one in lines.values()])
    table = np.where(np.isfinite(table), table, np.nan)
    known = np.isfinite(table).any(axis=0)
    rows = np.full((len(shares), kept.size), np.nan)
    # nanquantile is many times slower than quantile.
    quantile = np.nanquantile if np.isnan(table[:, known]).any() else np.quantile
    rows[:, known] = quantile(table[:, known], shares, axis=0)
    return [Line(steps[kept], row) for row in rows]


def _lowest_and_highest(lines: Mapping[str, Line]) -> tuple[str, str]:
    """The names of the lines with the lowest and the highest median over their last tenth."""
    levels = {}
    for name, one in lines.items():
        found = one.values[one.finite]
        if found.size:
            levels[name] = float(np.median(found[-max(1, found.size // 10) :]))
    return min(levels, key=levels.__getitem__), max(levels, key=levels.__getitem__)


def _areas(ax: Axes, axis: StepAxis, lines: Mapping[str, Line]) -> Artists:
    low, first, third, high = quantiles(lines, (0, 0.25, 0.75, 1))
    return {
        "range": band(ax, axis, low, high, tint(BLUE, 0.6)),
        "quartiles": band(ax, axis, first, third, BLUE),
    }


def _extremes(ax: Axes, axis: StepAxis, lines: Mapping[str, Line]) -> Artists:
    """The names of the lowest and the highest line, at their ends on the right.

    They are between the two lines if there is room for both, and otherwise outside. A name that
    would cover a line between them is outside, if it covers none there.
    """
    names = _lowest_and_highest(lines)
    ends = [smooth(axis, lines[name]) for name in names]
    last = [float(_heights(ax, one.steps, one.values)[-1]) for one in ends]
    pixel = figure_of(ax).dpi / 72
    room = (last[1] - last[0]) / pixel > 2.6 * points(7)
    width = 0.6 * size_in_points(ax)[0]
    artists: Artists = {}
    taken: list[Floats] = []
    for which, name, line, end, sides, color in zip(
        ("lowest", "highest"),
        names,
        ends,
        last,
        (("bottom", "top"), ("top", "bottom")),
        (PURPLE, ORANGE),
        strict=True,
    ):
        label = shorten(name, width, SMALLEST_SIZE)
        span = (text_width(label, SMALLEST_SIZE) + 3) * pixel
        own = _heights(ax, line.steps, line.values, span)
        others = [_heights(ax, *_points(one), span=span) for one in ax.get_lines()]
        possible = sides if room else sides[1:]
        side, height = _free_place(ax, own, [*taken, *others], possible) or (possible[0], end)
        taken.append(height + np.array([0.0, _line_of_text(ax) * (1 if side == "bottom" else -1)]))
        artists[f"{which} name"] = ax.annotate(
            label,
            (1, _inside(ax, height, side)),
            xycoords="axes fraction",
            xytext=(-1, 1.5 if side == "bottom" else -1.5),
            textcoords="offset points",
            fontsize=SMALLEST_SIZE,
            color=color,
            ha="right",
            va=side,
            zorder=6,
            bbox={"boxstyle": "square,pad=0.08", "facecolor": PAPER, "alpha": 0.75, "linewidth": 0},
        )
    return artists


def _points(line: Line2D) -> tuple[Floats, Floats]:
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def _heights(ax: Axes, steps: Floats, values: Floats, span: float = math.inf) -> Floats:
    """Heights of a line in pixels, over the last ``span`` pixels of the axis."""
    places = ax.transData.transform(np.column_stack([steps, values]))
    x, y = places[np.isfinite(places).all(axis=1)].T
    left = ax.bbox.x1 - span
    if not x.size or x[0] >= left:
        return np.asarray(y, dtype=np.float64)
    return np.append(np.interp(left, x, y), y[x > left])


def _free_place(
    ax: Axes, own: Floats, others: Sequence[Floats], sides: Sequence[Side]
) -> tuple[Side, float] | None:
    """The first side of a line, and the height there, where a text covers none of the others."""
    for side in sides:
        height = float(own.max() if side == "bottom" else own.min())
        low = height if side == "bottom" else height - _line_of_text(ax)
        high = low + _line_of_text(ax)
        covers = any(one.size and one.min() < high and one.max() > low for one in others)
        if not covers and ax.bbox.y0 <= low and high <= ax.bbox.y1:
            return side, height
    return None


def _inside(ax: Axes, height: float, side: Side) -> float:
    """A height in pixels as a share of the axis, with room for a line of text on one side of it."""
    room = _line_of_text(ax) / ax.bbox.height
    share = (height - ax.bbox.y0) / ax.bbox.height
    return min(max(share, room if side == "top" else 0.0), 1 - (room if side == "bottom" else 0.0))


def _line_of_text(ax: Axes) -> float:
    """Pixels that a line of small text takes."""
    return points(9) * figure_of(ax).dpi / 72


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


def label_rows(ax: Axes, labels: Sequence[str], stride: int, count: int) -> None:
    """Set the value axis to ``count`` rows, the first on top, and label each ``stride``-th."""
    ax.set_yscale("linear")
    ax.set_ylim(count, 0)
    ax.set_ylabel("")
    ax.grid(visible=False)
    ax.yaxis.set_major_locator(FixedLocator([row + 0.5 for row in range(0, count, stride)]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FixedFormatter(labels))
