"""Draws numbers per step: curves, and thin lines of layers or parameters behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gradlens.history.lines import Floats, Line
from gradlens.instruments.drawing import (
    alone,
    apart,
    at_height,
    band,
    beyond,
    curve,
    explain_empty,
    missing,
    picture_and_series,
    thread,
    zero_line,
)
from gradlens.instruments.layers import short_names
from gradlens.instruments.panel import (
    MOST_LINES,
    Artists,
    Curve,
    Lines,
    always_infinite,
    any_finite,
    without_zeros,
)
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.series import lowest_and_highest, quantiles, smooth, thin
from gradlens.instruments.shapes import draw_beside
from gradlens.instruments.style import (
    ALARM,
    AMBER,
    BLUE,
    MUTED,
    PAPER,
    TICK_SIZE,
    Entry,
    darker,
    figure_of,
    key,
    points,
    sequence_key,
    shorten,
    size_in_points,
    subtitle,
    text_width,
    tint,
)

HOLLOW = 15
"""Columns for hollow points; more of them would cover the lines."""
NAMED_AT_ENDS = 8
"""Up to so many layers have their names at the ends of their lines."""
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
    finite = {name: one for name, one in shown.layers.items() if not always_infinite(one)}
    layers, zeros = without_zeros(finite, shown.scale)
    few = shown.single_lines or len(layers) <= MOST_LINES
    for place, one in enumerate(reversed(shown.layer_curves) if layers else ()):
        line = smooth(one.line, axis.warp)
        artists[one.name] = thread(ax, axis, line, one.color, one.width, 2.5 + 0.01 * place)
    for place, one in enumerate(shown.finite_curves):
        artists |= curve(ax, axis, one, place + (5 if layers else 3))
    fronts = {one.name: _front(artists, one.name) for one in shown.finite_curves}
    shown.up(axis.warp).apply(ax)
    separate(ax, [fronts[one.name] for one in shown.finite_curves if one.style is None])
    for one in shown.finite_curves:
        for number, (low, high) in enumerate(one.spreads, 1):
            name = f"{one.name} band" + f" {number}" * (number > 1)
            artists[name] = band(ax, axis, low, high, one.color)
    artists |= {} if few else _areas(ax, axis, layers)
    entries = _entries(shown, fronts, zeros)
    named = _names_at_ends(ax, _to_be_named(shown, layers, few))
    artists |= named
    if few and (named or shown.named_at_ends):
        explained = key(head, _entries_of_zeros(shown, zeros), width)
    elif few and layers:
        explained = sequence_key(head, [*layers], entries)
    else:
        explained = key(head, [*entries, *(() if few else _key_of_quantiles(len(layers)))], width)
    if explained is not None:
        artists["key"] = explained
    elif shown.words:
        artists["subtitle"] = subtitle(head, shown.words)
    artists |= _zero_floor(ax, list(zeros.values())) if zeros else {}
    artists |= _levels(ax, shown.levels) | _danger(ax, axis, shown.danger) | zero_line(ax)
    artists |= _hollow(ax, axis, layers, shown.uncertain) if shown.uncertain is not None else {}
    artists |= _beyond(ax, axis, shown) if shown.spiky else {}
    return artists | missing(ax, axis, shown.lines)


def _front(artists: Artists, name: str) -> Line2D:
    """The last of what has been drawn for a curve."""
    front = artists.get(f"{name} trend", artists[name])
    assert isinstance(front, Line2D)
    return front


def _entries(shown: Lines, fronts: Mapping[str, Line2D], zeros: Mapping[str, Line]) -> list[Entry]:
    """The entries of a key, but for those of layers that are drawn."""
    curves = shown.finite_curves if len(shown.lines) > 1 else ()
    return [
        *(shown.beside.key if shown.beside is not None else ()),
        *(
            Entry(one.name, one.color, "dashed" if fronts[one.name].is_dashed() else "line")
            for one in curves
        ),
        *_entries_of_zeros(shown, zeros),
    ]


def _entries_of_zeros(shown: Lines, zeros: Mapping[str, Line]) -> list[Entry]:
    """The entries of a key for what isn't drawn as a line: what ends in zeros or is always ∞."""
    dead = [n for n, one in zeros.items() if one.finite.any() and not one.values[one.finite][-1]]
    which = dead[0] if len(dead) == 1 else f"{len(dead)} of {len(shown.layers)}"
    is_exact = all(shown.layers[name].values[-1] == 0 for name in dead)
    entries = [Entry(f"{'zero' if is_exact else '≈ 0'}: {which}", AMBER)] if dead else []
    names = shown.infinite
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    return [*entries, *([Entry(f"∞: {names[0]}{more}", MUTED)] if names else [])]


def _levels(ax: Axes, levels: Sequence[float]) -> Artists:
    return {
        f"level {level:g}": ax.axhline(level, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)
        for level in levels
    }


def _danger(ax: Axes, axis: StepAxis, threshold: Line | None) -> Artists:
    """The area above a threshold."""
    if threshold is None or not threshold.finite.any():
        return {}
    shown = smooth(threshold, axis.warp)
    steps, values = thin(shown.steps, shown.values, warp=axis.warp)
    top = ax.get_ylim()[1]
    area = ax.fill_between(
        steps, np.minimum(values, top), top, color=tint(ALARM, 0.09), linewidth=0, zorder=0.5
    )
    return {"danger": area}


def _beyond(ax: Axes, axis: StepAxis, shown: Lines) -> Artists:
    """Arrows where values, or trends of the ends of intervals, are out of range."""
    spreads = [spread for one in shown.curves for spread in one.spreads]
    ends = [smooth(end, axis.warp) for spread in spreads for end in spread]
    return beyond(ax, axis, [*shown.lines, *ends])


def _hollow(ax: Axes, axis: StepAxis, lines: Mapping[str, Line], steps: Floats) -> Artists:
    """Hollow points on lines, at a few of some steps."""
    artists: Artists = {}
    for name, one in lines.items():
        chosen = np.isin(one.steps, steps)
        shown = thin(one.steps[chosen], one.values[chosen], columns=HOLLOW, warp=axis.warp)
        (artists[f"{name} uncertain"],) = ax.plot(
            *shown, linestyle="none", marker="o", markersize=2.8, markerfacecolor=PAPER,
            markeredgecolor=MUTED, markeredgewidth=0.8, zorder=4,
        )  # fmt: skip
    return artists


def _to_be_named(shown: Lines, layers: Mapping[str, Line], few: bool) -> dict[str, Curve]:
    """The curves that have names at their ends: a few, or the lowest and the highest of many."""
    curves = {one.name: one for one in shown.curves}
    drawn = shown.layer_curves
    if not few:
        return dict(zip(lowest_and_highest(layers), drawn[1:], strict=True))
    if shown.named_at_ends or 1 < len(layers) <= NAMED_AT_ENDS:
        return curves | dict(zip(short_names([*layers]), drawn, strict=False))
    return {}


def _names_at_ends(ax: Axes, named: Mapping[str, Curve]) -> Artists:
    """The names of curves on the right, for which the axis becomes narrower, if there is room.

    An axis inside another one has its place from that, and can't become narrower.
    """
    width, height = size_in_points(ax)
    gap = points(ROOM_OF_NAME)
    shown = {name: one for name, one in named.items() if one.line.finite.any()}
    is_inside = ax.get_axes_locator() is not None
    if len(shown) * gap > height or len(named) < 2 or is_inside:
        return {}
    curves = [*shown.values()]
    short = [shorten(name, 0.25 * width, TICK_SIZE) for name in shown]
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
        artists[f"{curves[place].name} name"] = ax.annotate(
            short[place],
            (1, level / height),
            xycoords="axes fraction",
            xytext=(points(3), 0),
            textcoords="offset points",
            fontsize=TICK_SIZE,
            color=darker(curves[place].color),
            va="center",
            annotation_clip=False,
        )
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


def _key_of_quantiles(count: int) -> tuple[Entry, ...]:
    return (
        Entry(f"median of {count}", BLUE),
        Entry("quartiles", tint(BLUE, 0.3), "box"),
        Entry("all", tint(BLUE, 0.12), "box"),
    )


def _areas(ax: Axes, axis: StepAxis, lines: Mapping[str, Line]) -> Artists:
    low, first, third, high = quantiles(lines, (0, 0.25, 0.75, 1))
    return {
        "range": band(ax, axis, low, high, tint(BLUE, 0.6)),
        "quartiles": band(ax, axis, first, third, BLUE),
    }


NEAR = 0.5
"""Points between two lines of which one hides the other."""
DASH = 2.5
"""Length of a dash in widths of its line."""

Dashes = Literal["-"] | tuple[float, tuple[float, ...]]


def separate(ax: Axes, drawn: Sequence[Line2D]) -> None:
    """Dash drawn lines that would hide earlier ones.

    Call it when the range of the axis is that of the values.
    """
    styles = dashes([_in_points(ax, one) for one in drawn])
    for one, style in zip(drawn, styles, strict=True):
        one.set_linestyle(style)


def _in_points(ax: Axes, drawn: Line2D) -> Line:
    steps, values = (np.asarray(one, dtype=np.float64) for one in drawn.get_data())
    heights = ax.transData.transform(np.stack([steps, values], 1))[:, 1]
    return Line(steps, heights * 72 / figure_of(ax).dpi)


def dashes(lines: Sequence[Line]) -> list[Dashes]:
    """A solid line for each, and dashes for one that would hide an earlier one; in points."""
    first: list[int] = []
    for place, one in enumerate(lines):
        hidden = [first[other] for other in range(place) if _hides(one, lines[other])]
        first.append(hidden[0] if hidden else place)
    counts = Counter(first)
    seen: Counter[int] = Counter()
    styles: list[Dashes] = []
    for place in first:
        number, count = seen[place], counts[place]
        # The dashes of each fill the gaps of the others.
        dash: Dashes = (-DASH * number, (DASH, DASH * (count - 1)))
        styles.append(dash if number else "-")
        seen[place] += 1
    return styles


def _hides(front: Line, behind: Line) -> bool:
    """Whether two lines are less than ``NEAR`` apart at most of their common steps."""
    _, first, second = np.intersect1d(behind.steps, front.steps, return_indices=True)
    apart = np.abs(behind.values[first] - front.values[second])
    apart = apart[np.isfinite(apart)]
    return bool(apart.size) and bool(np.mean(apart <= NEAR) > 0.8)
