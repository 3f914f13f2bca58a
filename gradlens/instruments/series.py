"""Lines thinned and smoothed for a step axis, and numbers by layer as tables: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradlens.history.history import History
from gradlens.history.lines import PLAIN, Floats, Line, line, lines, number
from gradlens.history.records import NOUNS
from gradlens.history.series import Series
from gradlens.history.view import View
from gradlens.instruments.style import common

SMOOTH_FROM = 150
"""Finite values from which on the trend of a line is in front of it."""

QUANTILES = 2000
"""Steps at which quantiles are computed, at most: far more than a panel shows."""

Entry = TypeVar("Entry")
Places = NDArray[np.int64]
Warp = Callable[[Floats], Floats]


def input_to_output(names: Sequence[str], history: History) -> tuple[str, ...]:
    """Parameters or layers from input to output.

    The history has the order of parameters, and of the layers with parameters. If these are in
    order among ``names``, all others keep their places between them, and otherwise they come last.
    """
    order = network_order(history)
    known = [order[name] for name in names if name in order]
    if known == sorted(known):
        return tuple(names)
    return tuple(sorted(names, key=lambda name: order.get(name, len(order))))


def ordered(found: Mapping[str, Entry], history: History) -> dict[str, Entry]:
    """What there is for parameters or layers, from input to output."""
    return {name: found[name] for name in input_to_output(tuple(found), history)}


def network_order(history: History) -> dict[str, int]:
    """A place for each parameter, and for each module that one is in."""
    order: dict[str, int] = {}
    for parameter in history.parameters:
        words = parameter.split(".")
        for depth in range(len(words), 0, -1):
            order.setdefault(".".join(words[:depth]), len(order))
    return order


def in_force(name: str, steps: Floats, history: History) -> Line:
    """The value logged last as ``name``, at each of ``steps`` from the first logged one on."""
    is_logged = name in history and name not in history.sources
    logged = line(history[name] if is_logged else Series.of({}))
    last = np.searchsorted(logged.steps, steps, side="right") - 1
    return Line(steps[last >= 0], logged.values[last[last >= 0]])


def thin(
    steps: Floats, values: Floats, columns: int = 400, warp: Warp | None = None
) -> tuple[Floats, Floats]:
    """At most about three points per column that draw the same picture as all of them.

    Keeps the smallest and largest value of each of ``columns`` equal parts of the step axis, and
    a NaN where there is one, so that neither spikes nor gaps are lost. ``warp`` maps steps to
    places on a step axis that is not linear.
    """
    if steps.size <= 3 * columns:
        return steps, values
    places = warp(steps) if warp else steps
    span = places[-1] - places[0]
    column = ((places - places[0]) / span * (columns - 1)).astype(np.int64)
    finite = np.isfinite(values)
    order = np.lexsort((np.where(finite, values, 0.0), column, ~finite))
    order = order[: int(finite.sum())]
    gaps, first = np.flatnonzero(~finite), _starts(column[order])
    last = np.append(first[1:], order.size)[: first.size] - 1
    ends = (order[first], order[last], gaps[_starts(column[gaps])], [0, steps.size - 1])
    kept = np.unique(np.concatenate(ends).astype(np.int64))
    return steps[kept], np.where(finite, values, np.nan)[kept]


def _starts(column: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.flatnonzero(np.diff(column, prepend=-1))


def smooth(line: Line, warp: Warp | None = None, bridge: bool = False) -> Line:
    """The trend of a line of many points, with ``bridge`` across gaps; another line as it is."""
    return trend(line, warp, bridge=bridge) if line.finite.sum() >= SMOOTH_FROM else line


def ends_of_area(low: Line, high: Line, top: float, warp: Warp | None = None) -> tuple[Line, Line]:
    """Both ends of an area, up to ``top``; of many points, their trends.

    They have the same steps: what is many is decided by the first.
    """
    ends = [Line(one.steps, np.minimum(one.values, top)) for one in (low, high)]
    if low.finite.sum() >= SMOOTH_FROM:
        ends = [trend(end, warp, bridge=True) for end in ends]
    return ends[0], ends[1]


def trend(
    line: Line, warp: Warp | None = None, windows: int = 20, points: int = 240, bridge: bool = False
) -> Line:
    """Running median at about ``points`` places, over a ``windows``-th of the step axis.

    The median doesn't depend on single spikes or on the scale of the axis. The trend has the gaps
    of the line, with ``bridge`` only those that are as long as the window.
    """
    places = warp(line.steps) if warp else line.steps
    wanted = np.linspace(places[0], places[-1], points)
    centres = np.unique(np.searchsorted(places, wanted).clip(0, places.size - 1))
    middle = places[centres]
    reach = (places[-1] - places[0]) / windows / 2
    first = np.searchsorted(places, middle - reach, side="left")
    last = np.searchsorted(places, middle + reach, side="right") - 1
    medians = _medians(line.values, first, last)
    if not bridge:
        medians[~line.finite[centres]] = np.nan
    return Line(line.steps[centres], _softened(medians))


def _medians(values: Floats, first: Places, last: Places, samples: int = 101) -> Floats:
    # A sample of a long window has almost the same median, and takes bounded time and memory.
    rows = first[:, None] + np.linspace(0, 1, samples)[None, :] * (last - first)[:, None]
    window = values[np.rint(rows).astype(np.int64)]
    window = np.where(np.isfinite(window), window, np.nan)
    filled = np.isfinite(window).any(axis=1)
    medians = np.full(first.size, np.nan)
    # nanmedian is many times slower than median.
    median = np.nanmedian if np.isnan(window[filled]).any() else np.median
    medians[filled] = median(window[filled], axis=1)
    return medians


def _softened(values: Floats) -> Floats:
    # A running median has steps; a mean over a few neighbours smooths them.
    weights = np.array([1.0, 2.0, 3.0, 2.0, 1.0])
    finite = np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0.0), weights)[2:-2]
    counts = np.convolve(finite.astype(np.float64), weights)[2:-2]
    return np.where(finite, sums / np.where(finite, counts, 1.0), np.nan)


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


def lowest_and_highest(lines: Mapping[str, Line]) -> tuple[str, str]:
    """The names of the lines with the lowest and the highest median over their last tenth."""
    levels = {}
    for name, one in lines.items():
        found = one.values[one.finite]
        if found.size:
            levels[name] = float(np.median(found[-max(1, found.size // 10) :]))
    # Of equal ones, the first and the last.
    return min(levels, key=levels.__getitem__), max(reversed(levels), key=levels.__getitem__)


# Numbers by parameter or layer ---------------------------------------------------------------

FIELDS = ("value", "trace", "norm", "rms", "dead", "largest", "mean", "median", "cosine")
"""Of several numbers for a parameter, the first of these is shown."""


@dataclass(frozen=True)
class LayerTable:
    """``values`` ``[R, K]`` of R parameters or layers, from input to output, at K ``steps``.

    It is NaN where a value isn't a finite number, and where there is none; ``recorded`` ``[R, K]``
    is true in the first case.
    """

    names: tuple[str, ...]
    steps: Floats
    values: Floats
    recorded: NDArray[np.bool_]
    reason: str = ""


@dataclass(frozen=True)
class Layout:
    """Where the records of a series keep their numbers by parameter or layer.

    ``part`` is an entry of theirs, or empty if it is the records themselves; ``field`` is an entry
    of what is there for each parameter, or empty if that is a number.
    """

    part: str
    field: str
    noun: str


def layout(records: Series, history: History) -> Layout | None:
    """How a series holds numbers by parameter or layer; ``None`` if it doesn't.

    This is read from the first record that is a dict with entries. If it has no entry for
    parameters or layers, its keys must be names of these in the network.
    """
    if records.kinds <= PLAIN:
        return None
    first: Mapping[str, Any] = next((value for value in records.values() if _filled(value)), {})
    part = next((name for name in NOUNS if _filled(first.get(name))), "")
    parts = first[part] if part else first
    if not parts or not (part or {*parts} <= {*network_order(history)}):
        return None
    noun = "parameter" if {*parts} <= {*history.parameters} else "layer"
    one = next(iter(parts.values()))
    if isinstance(one, Mapping):
        field = next((field for field in FIELDS if _is_number(one.get(field))), None)
    else:
        field = "" if all(map(_is_number, parts.values())) else None
    return None if field is None else Layout(part, field, NOUNS.get(part, noun))


def are_shares(values: Floats, view: View) -> bool:
    """Whether the view's label begins with "share" and all numbers are between 0 and 1."""
    called = view.label.split()[:1] == ["share"]
    return called and bool(np.nanmin(values) >= 0) and bool(np.nanmax(values) <= 1)


def _filled(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or not np.isnan(number(value))


def row_lines(records: Series, found: Layout, history: History) -> dict[str, Line]:
    """The numbers of each parameter or layer, from input to output."""
    return ordered(lines(_parts(records, found), found.field), history)


def table(records: Series, found: Layout, history: History) -> LayerTable:
    """The numbers of a series by parameter or layer."""
    by_name = row_lines(records, found, history)
    names, parts = tuple(by_name), _parts(records, found)
    values = np.array([one.values for one in by_name.values()]).reshape(len(names), len(parts))
    steps, recorded = [*parts], np.ones(values.shape, dtype=np.bool_)
    for row, place in np.argwhere(np.isnan(values)):
        part = parts[steps[place]]
        recorded[row, place] = names[row] in part if isinstance(part, Mapping) else part is not None
    return LayerTable(
        names,
        np.array(steps, dtype=np.float64),
        np.where(np.isfinite(values), values, np.nan),
        recorded,
        next((one.reason for one in by_name.values() if one.reason), ""),
    )


def layer_class(name: str, history: History) -> str:
    """The class of a layer, or of the one that a parameter is in; empty if it isn't known."""
    for setup in reversed(history.setups.values()):
        layer = setup.layers.get(name) or setup.layers.get(name.rpartition(".")[0])
        if layer:
            return layer.classes[0]
    return ""


def _parts(records: Series, found: Layout) -> Series:
    return records.column(found.part) if found.part else records


def columns(found: LayerTable, most: int, warp: Warp) -> tuple[LayerTable, Floats]:
    """The table in at most ``most`` columns, and their edges ``[K + 1]`` as places on the axis.

    If there are more steps than ``most``, columns are equal parts of the step axis. Each has the
    value furthest from zero of its steps, and NaN only if none of them has a finite number.
    """
    places = warp(found.steps)
    span = places[-1] - places[0]
    if places.size > most:
        number_of = np.minimum((places - places[0]) / span * most, most - 1).astype(np.int64)
    else:
        number_of = np.arange(places.size)
    first = np.flatnonzero(np.diff(number_of, prepend=-1))
    last = np.append(first[1:], places.size) - 1
    known = np.isfinite(found.values)
    top = np.maximum.reduceat(np.where(known, found.values, -np.inf), first, axis=1)
    bottom = np.minimum.reduceat(np.where(known, found.values, np.inf), first, axis=1)
    furthest = np.where(-bottom > top, bottom, top)
    thinned = LayerTable(
        found.names,
        found.steps[last],
        np.where(np.isfinite(furthest), furthest, np.nan),
        np.logical_or.reduceat(found.recorded, first, axis=1),
        found.reason,
    )
    return thinned, edges(places[first], places[last])


def edges(first: Floats, last: Floats) -> Floats:
    """Ends ``[K + 1]`` of the columns of a map, which have these first and last places."""
    inner = (last[:-1] + first[1:]) / 2
    if not inner.size:
        return np.array([first[0] - 0.5, last[-1] + 0.5])
    return np.concatenate(([2 * first[0] - inner[0]], inner, [2 * last[-1] - inner[-1]]))


def short_names(names: Sequence[str]) -> list[str]:
    """The names without the modules that all of them are in."""
    count = common([name.split(".")[:-1] for name in names]) if len(names) > 1 else 0
    return [name.split(".", count)[-1] for name in names]
