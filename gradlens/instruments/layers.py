"""Numbers by parameter or layer as tables of layers × steps: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradlens.history.history import History
from gradlens.history.lines import PLAIN, Floats, Line, lines, number
from gradlens.history.records import NOUNS
from gradlens.history.series import Series
from gradlens.history.view import View
from gradlens.instruments.series import Warp, network_order, ordered
from gradlens.instruments.style import common

FIELDS = ("value", "trace", "norm", "rms", "dead", "mean", "median")
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

    @property
    def lines(self) -> dict[str, Line]:
        """A line for each row."""
        rows = zip(self.names, self.values, strict=True)
        return {name: Line(self.steps, values, self.reason) for name, values in rows}


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
    if not part:
        return _of_whole(first, history)
    field = _field(first[part])
    return None if field is None else Layout(part, field, NOUNS[part])


def words(found: Layout, view: View) -> str:
    """What the numbers of a layout are."""
    field = "" if found.field == "value" else found.field
    return field or view.label or "value"


def are_shares(values: Floats, view: View) -> bool:
    """Whether the view's label begins with "share" and all numbers are between 0 and 1."""
    called = view.label.split()[:1] == ["share"]
    return called and bool(np.nanmin(values) >= 0) and bool(np.nanmax(values) <= 1)


def _of_whole(value: Mapping[str, Any], history: History) -> Layout | None:
    field = _field(value) if value else None
    if field is None or not {*value} <= {*network_order(history)}:
        return None
    return Layout("", field, "parameter" if {*value} <= {*history.parameters} else "layer")


def _filled(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _field(parts: Mapping[str, Any]) -> str | None:
    first = next(iter(parts.values()))
    if not isinstance(first, Mapping):
        return "" if all(_is_number(part) for part in parts.values()) else None
    return next((field for field in FIELDS if _is_number(first.get(field))), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or not np.isnan(number(value))


def row_lines(records: Series, found: Layout, history: History) -> dict[str, Line]:
    """The numbers of each parameter or layer, from input to output."""
    return ordered(lines(_parts(records, found), found.field), history)


def table(records: Series, found: Layout, history: History) -> LayerTable:
    """The numbers of a series by parameter or layer."""
    by_name = row_lines(records, found, history)
    names, rows, parts = tuple(by_name), [*by_name.values()], _parts(records, found)
    values = np.array([one.values for one in rows]).reshape(len(names), len(parts))
    return LayerTable(
        names,
        np.array([*parts], dtype=np.float64),
        np.where(np.isfinite(values), values, np.nan),
        _recorded(values, names, parts),
        next((one.reason for one in rows if one.reason), ""),
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


def _recorded(values: Floats, names: Sequence[str], parts: Series) -> NDArray[np.bool_]:
    steps = [*parts]
    recorded = np.ones(values.shape, dtype=np.bool_)
    for row, place in np.argwhere(np.isnan(values)):
        part = parts[steps[place]]
        recorded[row, place] = names[row] in part if isinstance(part, Mapping) else part is not None
    return recorded


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
