"""Statistics of a series over epochs or windows, as lines with bands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Line, line_through
from gradlens.history.records import NOUNS
from gradlens.history.series import Series
from gradlens.history.view import View
from gradlens.instruments.drawing import (
    Artists,
    any_finite,
    band,
    curve,
    explain_empty,
    missing,
    readout,
    threads,
)
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import in_order
from gradlens.instruments.scales import StepAxis, fit
from gradlens.instruments.style import CATEGORICAL, Entry, key, title

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

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        view = self.view(history)
        heading = self.heading(history)
        leaves = _leaves(records)
        shown = _largest_group(leaves)
        if len(shown) > len(CATEGORICAL):
            middles = {path[1]: _middle(found) for path, found in shown.items()}
            names = in_order(tuple(middles), history)
            layers = {name: middles[name] for name in names}
            one_by_one = self.options.single_lines
            return threads(ax, axis, layers, view.yscale, single_lines=one_by_one)
        return self._bands(heading, view, ax, axis, shown, records)

    def _bands(
        self,
        heading: str,
        view: View,
        ax: Axes,
        axis: StepAxis,
        shown: Leaves,
        records: Series,
    ) -> Artists:
        axis.apply(ax)
        middles = {" ".join(path[-1:]): _middle(found) for path, found in shown.items()}
        if not any_finite(list(middles.values())):
            why = next((one.reason for one in middles.values() if one.reason), "")
            nothing = Line(records.steps, np.full(len(records), np.nan), why or records.reason)
            return explain_empty(ax, [nothing])
        if len(middles) == 1:
            title(ax, heading, *readout(next(iter(middles.values()))))
        spreads = [_spread(found) for found in shown.values()]
        artists: Artists = {}
        colors = CATEGORICAL[: len(middles)]
        for place, ((name, one), color) in enumerate(zip(middles.items(), colors, strict=True)):
            artists |= curve(ax, axis, one, color, name or "value", 3 + place)
        ends = [end.values for spread in spreads if spread for end in spread]
        fit(ax, [*(one.values for one in middles.values()), *ends], view.yscale)
        for name, spread, color in zip(middles, spreads, colors, strict=True):
            if spread:
                artists[f"{name or 'value'} spread"] = band(ax, axis, *spread, color)
        if len(middles) > 1:
            legend = key(ax, [Entry(n, c) for n, c in zip(middles, colors, strict=True)])
            artists |= {"key": legend} if legend else {}
        return artists | missing(ax, axis, list(middles.values()))


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


def _spread(found: Mapping[str, Line]) -> tuple[Line, Line] | None:
    if "mean" in found and "std" in found:
        mean, std = found["mean"], found["std"].values
        return Line(mean.steps, mean.values - std), Line(mean.steps, mean.values + std)
    for low, high in (("q1", "q3"), ("min", "max")):
        if low in found and high in found:
            return found[low], found[high]
    return None
