"""A number of each layer or parameter over time, and statistics over epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line, field_line, line_through, lines
from gradlens.history.records import NOUNS
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import are_shares
from gradlens.instruments.panel import Curve, Lines, always_infinite, any_finite
from gradlens.instruments.series import input_to_output
from gradlens.instruments.style import ALARM, BLUE, CATEGORICAL, ORANGE

SIZES = ("norm", "rms", "")
"""Entries of a layer's record to draw; an empty one if the record is the number itself."""


def layer_lines(records: Series, history: History, fields: Sequence[str]) -> dict[str, Line]:
    """The first of ``fields`` that the layers of some records have, from input to output.

    All lines are at the same steps. Layers that never have a number, such as a first one without a
    gradient at its input, are left out if others have numbers; ∞ counts as a number here. Records
    without layers give one line without numbers and with the reason.
    """
    part = next((name for name in NOUNS if records.having(name)), "layers")
    parts = records.column(part, whole=True)
    for field in fields:
        shown = {name: one for name, one in lines(parts, field).items() if _has_content(one)}
        found = {name: one for name, one in shown.items() if _has_numbers(one)} or shown
        if found:
            names = input_to_output(tuple(found), history)
            return {name: found[name] for name in names}
    nothing = Line(parts.steps, np.full(len(parts), np.nan), parts.reason)
    return {"": nothing}


def _has_numbers(one: Line) -> bool:
    return bool(one.finite.any()) or always_infinite(one)


def _has_content(one: Line) -> bool:
    return _has_numbers(one) or bool(one.reason)


class LayerLinesInstrument(Instrument):
    """Size of each layer's inputs, outputs or gradients, or of each parameter or its update."""

    kinds = (
        "OutputNorm",
        "InputNorm",
        "OutputGradientGeometry",
        "InputGradientGeometry",
        "GradientGeometry",
        "UpdateGeometry",
        "ParameterNorm",
        "ConditionNumber",
        "WeightSignFlips",
        "InputMean",
        "InputStd",
        "DeadNeurons",
        "MeanTID",
        "VarTID",
        "RankMe",
    )
    mapped = True

    def content(self, history: History) -> Lines:
        found = layer_lines(history[self.names[0]], history, SIZES)
        view = self.view(history)
        values = np.array([one.values for one in found.values()])
        shares = any_finite([*found.values()]) and are_shares(values, view)
        return Lines(layers=found, scale=view.yscale, words=view.label, shares=shares)


class CorrelationsInstrument(Instrument):
    """Cosine of the angle between consecutive gradients or updates, for each layer."""

    kinds = (
        "OutputGradientGeometry",
        "InputGradientGeometry",
        "GradientGeometry",
        "UpdateGeometry",
    )
    part = "correlation"
    aspect = "correlation"
    label = "cosine"

    def content(self, history: History) -> Lines:
        found = layer_lines(history[self.names[0]], history, ("correlation",))
        return Lines(layers=found, limits=(-1.05, 1.05))


MANY = 0.5
"""Fraction of dead units in a layer from which on it is an alarm."""


class ActivationInstrument(Instrument):
    """Fractions of active outputs and dead units over all layers, and of dead ones in the worst."""

    kinds = ("OutputActivation", "GradientActivation")

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        active, dead, worst = (field_line(records, n) for n in ("active", "dead", "worst"))
        known = worst.steps.size and worst.finite[-1]
        latest = f"worst {100 * worst.latest:.0f} % dead" if known else ""
        return Lines(
            (
                Curve("active", active, BLUE),
                Curve("dead", dead, ORANGE),
                Curve("dead, worst", worst, ALARM, width=1.0),
            ),
            latest=(latest, bool(worst.latest >= MANY)),
            shares=True,
            limits=(-0.02, 1.02),
        )


MIDDLES = ("mean", "median", "max", "min", "std", "iqr")
"""Statistics to draw as the line; the first that exists is taken."""

Leaves = Mapping[tuple[str, ...], Mapping[str, Line]]


class AggregateInstrument(Instrument):
    """The mean of a series over an epoch, or its median, within its spread.

    The band is mean ± std, or else the quartiles or the range. Numbers of many layers are drawn as
    those of single steps are, without bands.
    """

    kinds = ("Aggregate",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        scale = self.view(history).yscale
        shown = _largest_group(_leaves(records))
        if len(shown) > len(CATEGORICAL):
            middles = {path[1]: _middle(found) for path, found in shown.items()}
            return Lines(
                layers={name: middles[name] for name in input_to_output(tuple(middles), history)},
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
