"""From recorded values to arrays: pure functions, independent of drawing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradlens.history.history import History
from gradlens.history.series import Series, SeriesValues
from gradlens.history.undefined import Undefined

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Records = Mapping[int, Any]
Warp = Callable[[Floats], Floats]

CHUNK = 2**22
PLAIN = {float, int, bool, Undefined}
"""Types that numpy converts to numbers quickly."""


@dataclass(frozen=True)
class Line:
    """One number per step: ``steps`` ``[K]`` ascending and ``values`` ``[K]``.

    ``reason`` is why the latest value that isn't a number has none; empty if it isn't known.
    """

    steps: Floats
    values: Floats
    reason: str = ""

    @property
    def finite(self) -> NDArray[np.bool_]:
        """``[K]``, where there is a number to draw."""
        return np.isfinite(self.values)

    @property
    def latest(self) -> float:
        """Last value, which may be NaN or ∞; NaN if there is none."""
        return float(self.values[-1]) if self.values.size else float("nan")


def ordered(records: Records) -> Records:
    """The same records by ascending step."""
    if isinstance(records, Series):
        return records
    steps = sorted(records)
    if steps == [*records]:
        return dict(records)
    return {step: records[step] for step in steps}


def line(records: Records) -> Line:
    """A series of numbers; other values become NaN."""
    if isinstance(records, Series):
        return Line(records.steps, records.numbers(), records.reason)
    entries = ordered(records)
    return line_through(_array(entries), list(entries.values()))


def line_through(steps: Floats, values: Sequence[Any]) -> Line:
    """Values at ascending ``steps``; those that aren't numbers become NaN."""
    return Line(steps, _numbers(values), reason(values))


def field_line(records: Records, name: str) -> Line:
    """The entry ``name`` of each dict; a record that isn't a dict is a NaN with its reason."""
    if isinstance(records, Series):
        return line(records.column(name))
    found = ordered(records)
    return line_through(_array(found), column(found.values(), name))


def lines(records: Records, field: str = "") -> dict[str, Line]:
    """A series of dicts of numbers as one line per key; steps without the key are NaN.

    With ``field``, they are dicts of dicts that have this entry.
    """
    if isinstance(records, Series):
        found = {name: records.column(name) for name in records.names_of_entries}
        return {name: field_line(one, field) if field else line(one) for name, one in found.items()}
    entries = ordered(records)
    names = keys(entries)
    table = _table(list(entries.values()), names, field)
    if table is not None:
        steps = _array(entries)
        return {name: Line(steps, values) for name, values in zip(names, table.T, strict=True)}
    return _by_key(entries, _numbers, field)


def rms_lines(records: Records) -> dict[str, Line]:
    """A series of dicts of arrays as one line of root mean squares per key."""
    return _by_key(ordered(records), rms)


def _table(values: Sequence[Any], names: tuple[str, ...], field: str) -> Floats | None:
    """Dicts with the same keys and nothing but numbers as ``[K, R]``; ``None`` for others.

    Almost all records are of this kind, for which this is much faster than ``_by_key``.
    """
    if types(values) != {dict} or {*map(tuple, values)} != {names}:
        return None
    cells = [cell for value in values for cell in value.values()]
    if field:
        cells = [cell.get(field) for cell in cells] if types(cells) == {dict} else [None]
    if not types(cells) <= PLAIN - {Undefined}:
        return None
    return np.array(cells, dtype=np.float64).reshape(len(values), len(names))


def _by_key(
    entries: Records, numbers: Callable[[Sequence[Any]], Floats], field: str = ""
) -> dict[str, Line]:
    steps = _array(entries)
    found = {key: column(entries.values(), key) for key in keys(entries)}
    if field:
        found = {key: column(values, field) for key, values in found.items()}
    return {key: Line(steps, numbers(values), reason(values)) for key, values in found.items()}


def column(records: Collection[Any], key: str) -> list[Any]:
    """One entry of each dict, ``None`` where there is none.

    A record that isn't a dict is returned itself, because it may be an ``Undefined`` with a reason.
    """
    if isinstance(records, SeriesValues):
        return [*records.series.column(key).values()]
    if types(records) <= {dict}:
        return [value.get(key) for value in records]
    return [v.get(key) if isinstance(v, Mapping) else v for v in records]


def rows(arrays: Sequence[Any], most: int | None = None) -> Floats:
    """The first ``most`` elements of arrays ``[K, L]``, with NaN behind those of shorter ones.

    Values that are neither arrays nor lists are rows of NaN.
    """
    found = [array[:most] if isinstance(array, (np.ndarray, list)) else [] for array in arrays]
    lengths = np.array([len(one) for one in found], dtype=np.int64)
    table = np.full((len(found), lengths.max(initial=0)), np.nan)
    for length in np.unique(lengths):
        same = np.flatnonzero(lengths == length)
        table[same, :length] = np.array([found[place] for place in same], dtype=np.float64)
    return table


def quantile_lines(records: Records, shares: Sequence[float]) -> tuple[Line, ...]:
    """A series of arrays as one line per quantile of the array's finite elements."""
    entries = ordered(records)
    why = reason(entries.values())
    table = np.array([_quantiles(value, shares) for value in entries.values()])
    table = table.reshape(len(entries), len(shares))
    return tuple(Line(_array(entries), column, why) for column in table.T)


def entry(records: Records, name: str) -> Records:
    """One entry of a series of dicts, at the steps that have it."""
    if isinstance(records, Series):
        return records.having(name)
    found = {step: v for step, v in ordered(records).items() if isinstance(v, Mapping)}
    return {step: value[name] for step, value in found.items() if name in value}


def keys(records: Records) -> tuple[str, ...]:
    """Keys of a series of dicts, in the order of their first appearance."""
    if isinstance(records, Series):
        return records.names_of_entries
    if types(records.values()) <= PLAIN:
        return ()
    dicts = (value for value in ordered(records).values() if isinstance(value, Mapping))
    # Most records have the same ones.
    different = dict.fromkeys(map(tuple, dicts))
    return tuple(dict.fromkeys(key for found in different for key in found))


def input_to_output(names: Sequence[str], history: History) -> tuple[str, ...]:
    """Parameters or layers in the network's order; names that it doesn't have come last."""
    order = network_order(history)
    return tuple(sorted(names, key=lambda name: order.get(name, len(order))))


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
    logged = line({} if name in history.sources or name not in history else history[name])
    last = np.searchsorted(logged.steps, steps, side="right") - 1
    return Line(steps[last >= 0], logged.values[last[last >= 0]])


def reason(values: Iterable[Any]) -> str:
    """The reason of the latest value that has one; empty if none has."""
    if isinstance(values, SeriesValues):
        return values.series.reason
    found = [*values]
    if Undefined not in types(found):
        return ""
    return next(value.reason for value in reversed(found) if isinstance(value, Undefined))


def types(values: Iterable[Any]) -> set[type]:
    """The types of some values, which are found much faster than what each value is."""
    if isinstance(values, SeriesValues):
        return values.series.kinds
    return {*map(type, values)}


def number(value: Any) -> float:
    """A number as a float; NaN for everything else."""
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return float(value)
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "biuf":
        return float(value)
    return float("nan")


def rms(arrays: Sequence[Any]) -> Floats:
    """Root mean square of each array ``[K]``; NaN for empty arrays and other values."""
    usable = [isinstance(array, np.ndarray) and array.size > 0 for array in arrays]
    result = np.full(len(arrays), np.nan)
    places = [place for place, known in enumerate(usable) if known]
    shapes = {arrays[place].shape for place in places}
    for shape in shapes:
        same = [place for place in places if arrays[place].shape == shape]
        result[same] = _rms_of_equal_shapes([arrays[place] for place in same])
    return result


def _rms_of_equal_shapes(arrays: Sequence[NDArray[Any]]) -> Floats:
    # Arrays are stacked in pieces of bounded size, because one call for each array is slow, and one
    # call for all needs as much memory as the whole history.
    size = arrays[0].size
    piece = max(1, CHUNK // size)
    sums = [
        np.square(np.stack(arrays[start : start + piece]).reshape(-1, size), dtype=np.float64)
        for start in range(0, len(arrays), piece)
    ]
    means: Floats = np.concatenate([squares.mean(axis=1) for squares in sums])
    return np.sqrt(means)


def _quantiles(value: Any, shares: Sequence[float]) -> Floats:
    elements = np.asarray(value, dtype=np.float64) if _is_numeric(value) else np.array([])
    elements = elements[np.isfinite(elements)]
    if not elements.size:
        return np.full(len(shares), np.nan)
    found: Floats = np.quantile(elements, shares)
    return found


def _is_numeric(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(element, (int, float)) for element in value)
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def _numbers(values: Sequence[Any]) -> Floats:
    if types(values) <= PLAIN:
        return np.array(values, dtype=np.float64)
    return np.array([number(value) for value in values], dtype=np.float64)


def _array(entries: Mapping[int, Any]) -> Floats:
    return np.array(list(entries), dtype=np.float64)


def thin(
    steps: Floats,
    values: Floats,
    columns: int = 400,
    warp: Warp | None = None,
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
    gaps = np.flatnonzero(~finite)
    kept = np.concatenate(
        (_edges(order, column[order]), gaps[_starts(column[gaps])], [0, steps.size - 1])
    )
    kept = np.unique(kept.astype(np.int64))
    return steps[kept], np.where(finite, values, np.nan)[kept]


def _edges(order: NDArray[np.int64], column: NDArray[np.int64]) -> NDArray[np.int64]:
    first = _starts(column)
    last = np.append(first[1:], column.size)[: first.size] - 1
    return np.concatenate((order[first], order[last]))


def _starts(column: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.flatnonzero(np.diff(column, prepend=-1))


def trend(
    line: Line,
    warp: Warp | None = None,
    windows: int = 20,
    points: int = 240,
    bridge: bool = False,
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
