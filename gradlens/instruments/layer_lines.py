"""A number of each layer or parameter over time, as lines or as quantiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Floats, Line, lines
from gradlens.history.records import NOUNS
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import are_shares, in_order
from gradlens.instruments.panel import Lines, always_infinite

SIZES = ("norm", "rms", "")
"""Entries of a layer's record to draw; an empty one if the record is the number itself."""


@dataclass(frozen=True)
class LayerLines:
    """A line for each layer or parameter, from input to output, all at the same steps."""

    lines: Mapping[str, Line]

    @property
    def table(self) -> Floats:
        """``[R, K]``"""
        return np.array([one.values for one in self.lines.values()])


def layer_lines(records: Series, history: History, fields: Sequence[str]) -> LayerLines:
    """The first of ``fields`` that the layers of some records have.

    Layers that never have a number, such as a first one without a gradient at its input, are left
    out if others have numbers; ∞ counts as a number here. Records without layers give one line
    without numbers and with the reason.
    """
    part = next((name for name in NOUNS if records.having(name)), "layers")
    parts = records.column(part, whole=True)
    for field in fields:
        shown = {name: one for name, one in lines(parts, field).items() if _has_content(one)}
        found = {name: one for name, one in shown.items() if _has_numbers(one)} or shown
        if found:
            names = in_order(tuple(found), history)
            return LayerLines({name: found[name] for name in names})
    nothing = Line(parts.steps, np.full(len(parts), np.nan), parts.reason)
    return LayerLines({"": nothing})


def _has_numbers(one: Line) -> bool:
    return bool(one.finite.any()) or always_infinite(one)


def _has_content(one: Line) -> bool:
    return _has_numbers(one) or bool(one.reason)


class LayerLinesInstrument(Instrument):
    """Size of each layer's inputs, outputs or gradients, or of each parameter or its update."""

    kinds: ClassVar[tuple[str, ...]] = (
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
    together: ClassVar[bool] = False
    mapped: ClassVar[bool] = True

    def content(self, history: History) -> Lines:
        found = layer_lines(history[self.names[0]], history, SIZES)
        view = self.view(history)
        known = np.isfinite(found.table).any()
        return Lines(
            layers=found.lines,
            scale=view.yscale,
            words=view.label,
            shares=bool(known) and are_shares(found.table, view),
        )


class CorrelationsInstrument(Instrument):
    """Cosine of the angle between consecutive gradients or updates, for each layer."""

    kinds: ClassVar[tuple[str, ...]] = (
        "OutputGradientGeometry",
        "InputGradientGeometry",
        "GradientGeometry",
        "UpdateGeometry",
    )
    together: ClassVar[bool] = False
    part: ClassVar[str] = "correlation"
    aspect: ClassVar[str] = "correlation"
    label: ClassVar[str] = "cosine"

    def content(self, history: History) -> Lines:
        found = layer_lines(history[self.names[0]], history, ("correlation",))
        return Lines(layers=found.lines, limits=(-1.05, 1.05))
