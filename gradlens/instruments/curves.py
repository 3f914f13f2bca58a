"""Draws numbers per step: curves, and thin lines of layers or parameters behind them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from gradlens.history.lines import Floats, Line
from gradlens.instruments.panel import (
    Artists,
    Curve,
    Lines,
    LineStyle,
    always_infinite,
    any_finite,
    why_empty,
)
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.series import (
    SMOOTH_FROM,
    ends_of_area,
    lowest_and_highest,
    short_names,
    smooth,
    thin,
    trend,
)
from gradlens.instruments.shapes import draw_beside, picture_and_series
from gradlens.instruments.style import (
    ALARM,
    AMBER,
    BLUE,
    MUTED,
    TICK_SIZE,
    Color,
    Entry,
    darker,
    explained,
    figure_of,
    message,
    points,
    shorten,
    size_in_points,
    text_width,
    tint,
    written,
)

ROOM_OF_NAME = 8.5
"""Points that the name of a curve takes, at least."""
BESIDE = 34.0
"""Points between shapes and the lines beside them."""


def draw_lines(ax: Axes, axis: StepAxis, shown: Lines) -> Artists:
    """Draw curves over the steps of ``axis``, in front of the lines of layers.

    Lines of layers that have many points are drawn as trends only, because their raw values would
    cover each other. Of more lines than ``MOST_LINES`` there are quantiles, and the names of the
    highest and the lowest one, unless all are wanted. Lines that are ∞ at every step, and those
    that end in exact zeros, are named or counted in the key. Zeros aren't on a logarithmic axis: a
    thick line is at its base where there are any.
    """
    if not any_finite(shown.lines):
        axis.apply(ax)
        return explain_empty(ax, shown.lines, shown.message)
    head, width = ax, size_in_points(ax)[0]
    artists: Artists = {}
    if shown.beside is not None:
        picture, ax = picture_and_series(ax, shown.beside.share, BESIDE)
        artists |= draw_beside(picture, shown.beside) if picture is not None else {}
    axis.apply(ax)
    layers, zeros = shown.parts
    for place, one in enumerate(reversed(shown.layer_curves) if layers else ()):
        line = smooth(one.line, axis.warp)
        artists[one.name] = thread(ax, axis, line, one.color, one.width, 2.5 + 0.01 * place)
    fronts: dict[str, Line2D] = {}
    for place, one in enumerate(shown.finite_curves):
        drawn = curve(ax, axis, one, place + (5 if layers else 3))
        artists |= drawn
        fronts[one.name] = [*drawn.values()][-1]
    shown.up(axis.warp).apply(ax)
    separate(ax, [fronts[one.name] for one in shown.finite_curves if one.style is None])
    for one in (*shown.finite_curves, *shown.layer_curves):
        for number, (low, high) in enumerate(one.spreads, 1):
            name = f"{one.name} band" + f" {number}" * (number > 1)
            # The narrowest is the darkest.
            color = one.color if number == len(one.spreads) else tint(one.color, 0.6)
            artists[name] = band(ax, axis, low, high, color)
    named = _names_at_ends(ax, shown)
    artists |= named
    dashed = {name for name, front in fronts.items() if front.is_dashed()}
    artists |= explained(head, _entries(shown, dashed, bool(named)), shown.words, width)
    artists |= _zero_floor(ax, list(zeros.values())) if zeros else {}
    for level in shown.dashed:
        artists[f"level {level:g}"] = level_line(ax, level)
    if shown.danger is not None and shown.danger.finite.any():
        top = np.full_like(shown.danger.values, ax.get_ylim()[1])
        above = Line(shown.danger.steps, top)
        artists["danger"] = band(ax, axis, shown.danger, above, ALARM, 0.09, 0.5)
    if shown.spiky:
        # Where values, or trends of the ends of intervals, are out of range.
        spreads = [end for one in shown.curves for spread in one.spreads for end in spread]
        ends = [smooth(end, axis.warp) for end in spreads]
        artists |= beyond(ax, axis, [*shown.lines, *ends])
    return artists | missing(ax, axis, shown.lines)


def _entries(shown: Lines, dashed: Set[str], named: bool) -> list[Entry]:
    """The entries of a key, but for lines that are ``named`` at their ends."""
    layers, zeros = shown.parts
    # What isn't drawn as a line: what ends in zeros, and what is always ∞.
    dead = [n for n, one in zeros.items() if one.finite.any() and not one.values[one.finite][-1]]
    which = dead[0] if len(dead) == 1 else f"{len(dead)} of {len(shown.layers)}"
    is_exact = all(shown.layers[name].values[-1] == 0 for name in dead)
    others = [Entry(f"{'zero' if is_exact else '≈ 0'}: {which}", AMBER)] if dead else []
    every = [*shown.layers.items(), *((one.name, one.line) for one in shown.curves)]
    infinite = [name for name, line in every if always_infinite(line)]
    more = f" +{len(infinite) - 1}" if len(infinite) > 1 else ""
    others += [Entry(f"∞: {infinite[0]}{more}", MUTED)] if infinite else []
    if shown.few and (named or shown.named_at_ends):
        return others
    curves = shown.finite_curves if len(shown.lines) > 1 else ()
    entries = [
        *(shown.beside.key if shown.beside is not None else ()),
        *(Entry(o.name, o.color, "dashed" if o.name in dashed else "line") for o in curves),
        *others,
    ]
    if not shown.few:
        entries += [
            Entry(f"median of {len(layers)}", BLUE),
            Entry("quartiles", tint(BLUE, 0.3), "box"),
            Entry("all", tint(BLUE, 0.12), "box"),
        ]
    elif layers:
        ends = [shown.layer_curves[0], shown.layer_curves[-1]][: len(layers)]
        entries += [Entry(one.name, one.color) for one in ends]
    return entries


def _names_at_ends(ax: Axes, shown: Lines) -> Artists:
    """The names of curves on the right, for which the axis becomes narrower, if there is room.

    They are those of a few curves, or of the lowest and the highest of many. An axis inside another
    one has its place from that, and can't become narrower.
    """
    layers, drawn = shown.parts[0], shown.layer_curves
    named: dict[str, Curve] = {}
    if not shown.few:
        named = dict(zip(lowest_and_highest(layers), drawn[1:], strict=True))
    elif shown.named_at_ends or len(layers) > 1:
        named = {one.name: one for one in shown.curves}
        named |= dict(zip(short_names([*layers]), drawn, strict=False))
    width, height = size_in_points(ax)
    gap = points(ROOM_OF_NAME)
    finite = {name: one for name, one in named.items() if one.line.finite.any()}
    is_inside = ax.get_axes_locator() is not None
    if len(finite) * gap > height or len(named) < 2 or is_inside:
        return {}
    curves = [*finite.values()]
    short = [shorten(name, 0.25 * width, TICK_SIZE) for name in finite]
    room = max(text_width(name, TICK_SIZE) for name in short) + points(2)
    box = ax.get_position()
    ax.set_position((box.x0, box.y0, box.width * (1 - room / width), box.height))
    lines = [smooth(one.line, bridge=True) for one in curves]
    ends = [(0.0, one.values[one.finite][-1]) for one in lines]
    shares = (ax.transData.transform(ends)[:, 1] - ax.bbox.y0) / ax.bbox.height
    heights = np.clip(shares, 0, 1) * height
    order = np.argsort(heights, kind="stable")
    artists: Artists = {}
    for place, level in zip(order, apart(heights[order], gap, height), strict=True):
        look = {"fontsize": TICK_SIZE, "color": darker(curves[place].color), "va": "center"}
        name = written(ax, short[place], (1, level / height), (points(3), 0), **look)
        artists[f"{curves[place].name} name"] = name
    return artists


# Lines of layers ----------------------------------------------------------------------------


def _zero_floor(ax: Axes, lines: Sequence[Line]) -> Artists:
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
    shown, places = thin(steps, heights)
    marks = np.flatnonzero(alone(places)).tolist()
    look = {"marker": "s", "markersize": 2.6, "markevery": marks, "solid_capstyle": "butt"}
    return {"zeros": at_height(ax, shown, places, AMBER, linewidth=2.6, **look | {"zorder": 3.8})}


NEAR = 0.5
"""Points between two lines of which one hides the other."""
DASH = 2.5
"""Length of a dash in widths of its line."""


def separate(ax: Axes, drawn: Sequence[Line2D]) -> None:
    """Dash drawn lines that would hide earlier ones.

    Call it when the range of the axis is that of the values.
    """
    lines: list[Line] = []
    leaders: list[int] = []
    for place, one in enumerate(drawn):
        steps, values = (np.asarray(data, dtype=np.float64) for data in one.get_data())
        heights = ax.transData.transform(np.stack([steps, values], 1))[:, 1]
        lines.append(Line(steps, heights * 72 / figure_of(ax).dpi))
        hidden = (leaders[n] for n in range(place) if _hides(lines[place], lines[n]))
        leaders.append(next(hidden, place))
    for place, (one, leader) in enumerate(zip(drawn, leaders, strict=True)):
        number, count = leaders[:place].count(leader), leaders.count(leader)
        # The dashes of each fill the gaps of the others.
        one.set_linestyle((-DASH * number, (DASH, DASH * (count - 1))) if number else "-")


def _hides(front: Line, behind: Line) -> bool:
    """Whether two lines are less than ``NEAR`` apart at most of their common steps."""
    _, first, second = np.intersect1d(behind.steps, front.steps, return_indices=True)
    apart = np.abs(behind.values[first] - front.values[second])
    apart = apart[np.isfinite(apart)]
    return bool(apart.size) and bool(np.mean(apart <= NEAR) > 0.8)


# Curves, areas and marks --------------------------------------------------------------------

MARKERS_UP_TO = 30
ARROWS = 40
"""Largest number of arrows along an edge."""


def curve(ax: Axes, axis: StepAxis, shown: Curve, z: float = 3) -> dict[str, Line2D]:
    """A main line; of many points, their trend in front of the pale raw values."""
    line, style = shown.line, shown.style or "-"
    if line.finite.sum() < SMOOTH_FROM:
        return {shown.name: thread(ax, axis, line, shown.color, shown.width, z, style)}
    raw = thread(ax, axis, line, tint(shown.color, 0.35), width=0.6, z=2 + 0.01 * z)
    front = trend(line, axis.warp, bridge=True)
    drawn = thread(ax, axis, front, shown.color, shown.width, z, style)
    return {shown.name: raw, f"{shown.name} trend": drawn}


def thread(
    ax: Axes,
    axis: StepAxis,
    line: Line,
    color: Color,
    width: float = 0.9,
    z: float = 2.5,
    style: LineStyle = "-",
) -> Line2D:
    """A thin line, with markers if there are few values, and on a value between two gaps."""
    steps, values = thin(line.steps, line.values, warp=axis.warp)
    few = np.isfinite(values).sum() <= MARKERS_UP_TO
    marked = np.isfinite(values) if few else alone(values)
    look: dict[str, Any] = {"color": color, "linewidth": width, "linestyle": style, "zorder": z}
    look |= {"marker": "o", "markersize": 2.2 * width**0.5 + 0.4, "markeredgewidth": 0}
    every = np.flatnonzero(marked).tolist()
    (artist,) = ax.plot(steps, values, solid_joinstyle="round", markevery=every, **look)
    return artist


def alone(values: Floats) -> NDArray[np.bool_]:
    finite = np.isfinite(values)
    before = np.concatenate(([False], finite[:-1]))
    after = np.concatenate((finite[1:], [False]))
    return finite & ~before & ~after


def band(
    ax: Axes,
    axis: StepAxis,
    low: Line,
    high: Line,
    color: Color,
    share: float = 0.2,
    z: float = 1.5,
) -> Artist:
    """The area between two lines; of many points, between their trends.

    Call it after ``fit``: values above the range of the axis, even ∞, are drawn up to its top.
    """
    first, last = ends_of_area(low, high, 10 * abs(ax.get_ylim()[1]), axis.warp)
    look: dict[str, Any] = {"color": tint(color, share), "linewidth": 0, "zorder": z}
    return ax.fill_between(first.steps, first.values, last.values, **look)


def missing(ax: Axes, axis: StepAxis, lines: Sequence[Line]) -> Artists:
    """Marks at steps whose value isn't a finite number.

    Ticks are at the upper edge where the value is ∞, and otherwise on the base line, red unless a
    reason is known. Lines that are always ∞ are shown as one line along the upper edge.
    """
    infinite = [line.steps[np.isposinf(line.values)] for line in lines if not always_infinite(line)]
    others = [(line, ~line.finite & ~np.isposinf(line.values)) for line in lines]
    unknown = [line.steps[where & line.unexplained] for line, where in others]
    known = [line.steps[where & ~line.unexplained] for line, where in others]
    artists: Artists = {}
    for name, found, height, color in (
        ("missing", unknown, 0.0, ALARM),
        ("missing for a reason", known, 0.0, MUTED),
        ("infinite", infinite, 1.0, MUTED),
    ):
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
    usual |= {"transform": ax.get_xaxis_transform(), "color": color, "clip_on": False}
    (artist,) = ax.plot(steps, np.broadcast_to(height, steps.shape), **usual | look)
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
            places = axis.warp(np.unique(np.concatenate(found)))
            # One place of each part of the axis that is as wide as an arrow.
            part = (ends[1] - ends[0]) / ARROWS or 1.0
            _, first = np.unique(np.floor((places - ends[0]) / part), return_index=True)
            look = {"marker": marker, "markersize": 3.5, "linestyle": "none"}
            artists[name] = at_height(ax, axis.unwarp(places[first]), height, MUTED, **look)
    return artists


def level_line(ax: Axes, level: float) -> Artist:
    """A dashed line at a value."""
    return ax.axhline(level, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)


def explain_empty(ax: Axes, lines: Sequence[Line], why: str = "") -> Artists:
    """A message why there is nothing to draw: the reason of the latest value that has one."""
    return {"message": message(ax, why or why_empty(lines))}


def apart(places: Floats, gap: float, end: float) -> Floats:
    """Ascending places, moved to be ``gap`` apart and half a gap from 0 and from ``end``.

    Those that have no room are moved beyond 0.
    """
    shares = gap * np.arange(len(places))
    upwards = np.maximum.accumulate(np.maximum(places, gap / 2) - shares) + shares
    limits = end - gap / 2 - shares[::-1]
    return np.asarray(np.minimum(upwards, limits), dtype=np.float64)
