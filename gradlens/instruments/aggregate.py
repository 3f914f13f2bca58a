"""Statistics of a series over epochs or windows, as lines with bands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line, line_through
from gradlens.history.records import NOUNS
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import in_order
from gradlens.instruments.panel import Curve, Lines
from gradlens.instruments.style import CATEGORICAL

MIDDLES = ("mean", "median", "max", "min", "std", "iqr")
"""Statistics to draw as the line; the first that exists is taken."""

Leaves = Mapping[tuple[str, ...], Mapping[str, Line]]


class AggregateInstrument(Instrument):
    """The mean of a series over an epoch, or its median, within its spread.

    The band is mean ± std, or else the quartiles or the range. Numbers of many layers are drawn as
    those of single steps are, without bands.
    """

    kinds: ClassVar[tuple[str, ...]] = ("Aggregate",)
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        scale = self.view(history).yscale
        shown = _largest_group(_leaves(records))
        if len(shown) > len(CATEGORICAL):
            middles = {path[1]: _middle(found) for path, found in shown.items()}
            return Lines(
                layers={name: middles[name] for name in in_order(tuple(middles), history)},
                scale=scale,
            )
        if not shown:
            nothing = Line(records.steps, np.full(len(records), np.nan), records.reason)
            return Lines((Curve("value", nothing),))
        colors = CATEGORICAL[: len(shown)]
        curves = [
            Curve(" ".join(path[-1:]) or "value", _middle(found), color, spreads=_spread(found))
            for (path, found), color in zip(shown.items(), colors, strict=True)
        ]
        return Lines(tuple(curves), scale=scale)


def _leaves(records: Series) -> Leaves:
    """A line for each statistic of each number in the records."""
    values: dict[tuple[str, ...], dict[int, Mapping[str, Any]]] = {}
    for step, record in records.items():
        for path, leaf in _summaries(record):
            values.setdefault(path, {})[step] = leaf
    found = {}
    for path, leaf_by_step in values.items():
        steps = np.array([*leaf_by_step], dtype=np.float64)
        names = dict.fromkeys(name for leaf in leaf_by_step.values() for name in leaf)
        found[path] = {
            name: line_through(steps, [leaf.get(name) for leaf in leaf_by_step.values()])
            for name in names
        }
    return found


def _summaries(record: Any, path: tuple[str, ...] = ()) -> Any:
    if not isinstance(record, Mapping):
        return
    if "count" in record:
        yield path, record
        return
    for name, part in record.items():
        yield from _summaries(part, (*path, name))


def _largest_group(leaves: Leaves) -> Leaves:
    """The numbers of layers or parameters, the first of each; without these, all numbers."""
    layered = {path: found for path, found in leaves.items() if path[:1] and path[0] in NOUNS}
    first: dict[tuple[str, ...], Mapping[str, Line]] = {}
    for path, found in layered.items():
        first.setdefault(path[:2], found)
    return first or leaves


def _middle(found: Mapping[str, Line]) -> Line:
    return next(found[name] for name in (*MIDDLES, *found) if name in found)


def _spread(found: Mapping[str, Line]) -> tuple[tuple[Line, Line], ...]:
    if "mean" in found and "std" in found:
        mean, std = found["mean"], found["std"].values
        return ((Line(mean.steps, mean.values - std), Line(mean.steps, mean.values + std)),)
    for low, high in (("q1", "q3"), ("min", "max")):
        if low in found and high in found:
            return ((found[low], found[high]),)
    return ()
