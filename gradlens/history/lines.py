"""From recorded values to arrays: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradlens.history.series import Series, SeriesValues
from gradlens.history.undefined import Undefined

Floats = NDArray[np.float64]
Records = Mapping[int, Any]

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


def network_line(records: Records) -> Line:
    """The number of the whole network: a record itself, or its entry ``"value"`` if it has more."""
    return field_line(records, "value")


def lines(records: Records, field: str = "") -> dict[str, Line]:
    """A series of dicts of numbers as one line per key; steps without the key are NaN.

    With ``field``, they are dicts of dicts that have this entry.
    """
    if isinstance(records, Series):
        names = records.names_of_entries
        floats = records.table() if not field else None
        if floats is not None:
            return {name: Line(records.steps, one) for name, one in zip(names, floats, strict=True)}
        found = {name: records.column(name) for name in names}
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


def durations(stamps: Line) -> Line:
    """Seconds per step since the record before; NaN where the clock went backwards."""
    seconds = np.diff(stamps.values) / np.diff(stamps.steps)
    seconds = np.where(seconds > 0, seconds, np.nan)
    return Line(stamps.steps[1:], seconds, stamps.reason)


def entry(records: Records, name: str) -> Records:
    """One entry of a series of dicts, at the steps that have it."""
    if isinstance(records, Series):
        return records.having(name)
    found = {step: v for step, v in ordered(records).items() if isinstance(v, Mapping)}
    return {step: value[name] for step, value in found.items() if name in value}


def number_lines(records: Records, *, elements: bool = False) -> dict[str, Line]:
    """Each number of a series by its place in the values, such as ``layers/0/norm``.

    The place of values that are numbers themselves is empty. With ``elements``, those of arrays of
    one axis have their index as place. Texts, lists and other arrays are left out.
    """
    names = keys(records)
    if not names:
        found = _element_lines(records) if elements else {}
        return found or ({"": line(records)} if types(records.values()) & PLAIN else {})
    return {
        f"{name}/{place}".removesuffix("/"): one
        for name in names
        for place, one in number_lines(entry(records, name), elements=elements).items()
    }


def _element_lines(records: Records) -> dict[str, Line]:
    """Each element of a series of arrays of one axis; none for other values."""
    if np.ndarray not in types(records.values()):
        return {}
    entries = ordered(records)
    values = [*entries.values()]
    usable = [_is_numeric(value) and np.ndim(value) == 1 for value in values]
    table = rows([value if one else None for value, one in zip(values, usable, strict=True)])
    steps, why = _array(entries), reason(values)
    return {str(place): Line(steps, one, why) for place, one in enumerate(table.T)}


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
