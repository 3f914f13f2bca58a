"""From recorded values to arrays: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradlens.history.series import Series
from gradlens.history.undefined import Undefined

if TYPE_CHECKING:
    import pandas

Floats = NDArray[np.float64]

PLAIN = {float, int, bool, Undefined}
"""Types of numbers."""


@dataclass(frozen=True)
class Line:
    """One number per step: ``steps`` ``[K]`` ascending and ``values`` ``[K]``.

    ``reason`` is why the latest value that isn't a number has none; empty if it isn't known.
    ``explained`` ``[K]`` says of which values a reason is known, without it that of the latest.
    """

    steps: Floats
    values: Floats
    reason: str = ""
    explained: NDArray[np.bool_] | None = None

    @property
    def finite(self) -> NDArray[np.bool_]:
        """``[K]``, where there is a number to draw."""
        return np.isfinite(self.values)

    @property
    def unexplained(self) -> NDArray[np.bool_]:
        """``[K]``, where there is no number to draw, and no reason is known."""
        known = bool(self.reason) if self.explained is None else self.explained
        return ~self.finite & ~np.broadcast_to(known, self.values.shape)

    @property
    def latest(self) -> float:
        """Last value, which may be NaN or ∞; NaN if there is none."""
        return float(self.values[-1]) if self.values.size else float("nan")


def line(series: Series) -> Line:
    """A series of numbers; other values become NaN."""
    return Line(series.steps, series.numbers(), series.reason, series.explained)


def line_through(steps: Floats, values: Sequence[Any]) -> Line:
    """Values at ascending ``steps``; those that aren't numbers become NaN."""
    return Line(steps, np.array([number(value) for value in values]), reason(values))


def field_line(series: Series, name: str) -> Line:
    """The entry ``name`` of each dict; a record that isn't a dict is a NaN with its reason."""
    return line(series.column(name))


def network_line(series: Series) -> Line:
    """The number of the whole network: a record itself, or its entry ``"value"`` if it has more."""
    return field_line(series, "value")


def lines(series: Series, field: str = "") -> dict[str, Line]:
    """A series of dicts of numbers as one line per key; steps without the key are NaN.

    With ``field``, they are dicts of dicts that have this entry.
    """
    found = {name: series.column(name) for name in series.entries}
    return {name: field_line(one, field) if field else line(one) for name, one in found.items()}


def head_lines(series: Series) -> dict[str, Line]:
    """As ``lines``, with a line for each element of arrays ``[H]``, such as those of H heads."""
    found: dict[str, Line] = {}
    for name in series.entries:
        for place, one in number_lines(series.column(name), elements=True).items():
            found[f"{name}.head {place}" if place else name] = one
    return found


def rms_lines(series: Series) -> dict[str, Line]:
    """A series of dicts of arrays as one line of root mean squares per key."""
    found = {name: series.column(name) for name in series.entries}
    return {
        name: Line(one.steps, np.array([*map(rms, one.values())]), one.reason)
        for name, one in found.items()
    }


def rows(arrays: Sequence[Any], most: int | None = None) -> Floats:
    """The first ``most`` elements of arrays ``[K, L]``, with NaN behind those of shorter ones.

    Values that are neither arrays nor lists are rows of NaN.
    """
    found = [array[:most] if isinstance(array, (np.ndarray, list)) else [] for array in arrays]
    table = np.full((len(found), max(map(len, found), default=0)), np.nan)
    for row, array in zip(table, found, strict=True):
        row[: len(array)] = array
    return table


def quantile_lines(series: Series, shares: Sequence[float]) -> tuple[Line, ...]:
    """A series of arrays as one line per quantile of the array's finite elements."""
    table = np.array([quantiles(value, shares) for value in series.values()])
    table = table.reshape(len(series), len(shares))
    return tuple(Line(series.steps, column, series.reason) for column in table.T)


def durations(stamps: Line) -> Line:
    """Seconds per step since the record before; NaN where the clock went backwards."""
    seconds = np.diff(stamps.values) / np.diff(stamps.steps)
    seconds = np.where(seconds > 0, seconds, np.nan)
    return Line(stamps.steps[1:], seconds, stamps.reason)


def number_lines(series: Series, *, elements: bool = False) -> dict[str, Line]:
    """Each number of a series by its place in the values, such as ``layers/0/norm``.

    The place of values that are numbers themselves is empty. With ``elements``, those of arrays of
    one axis have their index as place. Texts, lists and other arrays are left out.
    """
    if not series.entries:
        found = _element_lines(series) if elements else {}
        return found or ({"": line(series)} if series.kinds & PLAIN else {})
    return {
        f"{name}/{place}".removesuffix("/"): one
        for name in series.entries
        for place, one in number_lines(series.having(name), elements=elements).items()
    }


def _element_lines(series: Series) -> dict[str, Line]:
    """Each element of a series of arrays of one axis; none for other values."""
    if np.ndarray not in series.kinds:
        return {}
    usable = [one if is_numeric(one) and np.ndim(one) == 1 else None for one in series.values()]
    table = rows(usable).T
    return {str(n): Line(series.steps, one, series.reason) for n, one in enumerate(table)}


def frame(columns: Mapping[str, Line], steps: Sequence[int]) -> pandas.DataFrame:
    """A row for each step and a column for each line, NaN where it has no number."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("a DataFrame needs pandas: pip install 'gradlens[pandas]'") from error
    index = pandas.Index(steps, dtype=np.int64, name="step")
    found = {
        name: pandas.Series(line.values, line.steps.astype(np.int64))
        for name, line in columns.items()
    }
    return pandas.DataFrame(found, index)


def reason(values: Iterable[Any]) -> str:
    """The reason of the latest value that has one; empty if none has."""
    reasons = [value.reason for value in values if isinstance(value, Undefined)]
    return reasons[-1] if reasons else ""


def number(value: Any) -> float:
    """A number as a float; NaN for everything else."""
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return float(value)
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "biuf":
        return float(value)
    return float("nan")


def rms(array: Any) -> float:
    """Root mean square of an array; NaN for an empty one and other values."""
    if not isinstance(array, np.ndarray) or not array.size:
        return math.nan
    return float(np.sqrt(np.square(array, dtype=np.float64).mean()))


def quantiles(value: Any, shares: Sequence[float]) -> Floats:
    """Quantiles ``[S]`` of an array's finite elements; NaN without any."""
    elements = np.asarray(value, dtype=np.float64) if is_numeric(value) else np.array([])
    elements = elements[np.isfinite(elements)]
    if not elements.size:
        return np.full(len(shares), np.nan)
    found: Floats = np.quantile(elements, shares)
    return found


def is_numeric(value: Any) -> bool:
    """Whether it is an array or a list of numbers."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(element, (int, float)) for element in value)
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
