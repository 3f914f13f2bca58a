"""A number of each layer or parameter over time, as lines or as a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Floats, Line, Records, entry, lines, ordered, reason
from gradlens.history.records import NOUNS
from gradlens.history.series import Series
from gradlens.instruments.drawing import (
    Artists,
    always_infinite,
    any_finite,
    band,
    curve,
    explain_empty,
    infinite_entry,
    missing,
    threads,
    zero_line,
)
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import are_shares, in_order
from gradlens.instruments.scales import PercentLabels, Scale, StepAxis, fit
from gradlens.instruments.style import BLUE, INK, Entry, key, subtitle, tint, title

FEW = 8
"""Largest number of layers with a line each."""

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


def layer_lines(records: Records, history: History, fields: Sequence[str]) -> LayerLines:
    """The first of ``fields`` that the layers of some records have.

    Layers that never have a number, such as a first one without a gradient at its input, are left
    out if others have numbers; ∞ counts as a number here. Records without layers give one line
    without numbers and with the reason.
    """
    part = next((name for name in NOUNS if entry(records, name)), "layers")
    parts = _parts(records, part)
    for field in fields:
        shown = {name: one for name, one in lines(parts, field).items() if _has_content(one)}
        found = {name: one for name, one in shown.items() if _has_numbers(one)} or shown
        if found:
            names = in_order(tuple(found), history)
            return LayerLines({name: found[name] for name in names})
    steps = np.array([*parts], dtype=np.float64)
    nothing = Line(steps, np.full(steps.size, np.nan), reason(parts.values()))
    return LayerLines({"": nothing})


def _parts(records: Records, part: str) -> Records:
    """An entry of the records that have it, and the others themselves."""
    if isinstance(records, Series):
        return records.column(part, whole=True)
    return {step: v[part] if _has(v, part) else v for step, v in ordered(records).items()}


def _has(value: object, part: str) -> bool:
    return isinstance(value, Mapping) and part in value


def _has_numbers(one: Line) -> bool:
    return bool(one.finite.any()) or always_infinite(one)


def _has_content(one: Line) -> bool:
    return _has_numbers(one) or bool(one.reason)


def draw_layers(ax: Axes, axis: StepAxis, found: LayerLines, scale: Scale) -> Artists:
    """A line for each of a few layers; of many layers, the median, the quartiles and the range."""
    if len(found.lines) <= FEW:
        return threads(ax, axis, found.lines, scale)
    axis.apply(ax)
    every = list(found.lines.values())
    if not any_finite(every):
        return explain_empty(ax, every)
    low, q1, middle, q3, high = _quantiles(found)
    artists = curve(ax, axis, middle, INK, "median", z=5)
    fit(ax, [one.values for one in (low, middle, high)], scale)
    artists |= {
        "range": band(ax, axis, low, high, tint(BLUE, 0.6)),
        "quartiles": band(ax, axis, q1, q3, BLUE),
    }
    infinite = [name for name, one in found.lines.items() if always_infinite(one)]
    words = [
        Entry(f"median of {len(every)}", INK),
        *infinite_entry(infinite),
        Entry("quartiles", tint(BLUE, 0.3), "box"),
        Entry("all", tint(BLUE, 0.12), "box"),
    ]
    shown = key(ax, words)
    artists |= {"key": shown} if shown else {}
    others = [one for name, one in found.lines.items() if name not in infinite]
    sometimes = np.isposinf([one.values for one in others]).any(axis=0)
    lost = Line(middle.steps, np.where(sometimes, np.inf, middle.values))
    return artists | missing(ax, axis, [lost, *(found.lines[name] for name in infinite)])


def _quantiles(found: LayerLines) -> list[Line]:
    table = found.table
    table = np.where(np.isfinite(table), table, np.nan)
    known = np.isfinite(table).any(axis=0)
    rows = np.full((5, table.shape[1]), np.nan)
    rows[:, known] = np.nanquantile(table[:, known], (0, 0.25, 0.5, 0.75, 1), axis=0)
    steps = next(iter(found.lines.values())).steps
    return [Line(steps, row) for row in rows]


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

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        found = layer_lines(history[self.names[0]], history, SIZES)
        view = self.view(history)
        artists = draw_layers(ax, axis, found, view.yscale)
        if any_finite([*found.lines.values()]) and are_shares(found.table, view):
            ax.yaxis.set_major_formatter(PercentLabels())
            low, high = ax.get_ylim()
            ax.set_ylim(max(low, 0.0), min(high, 1.0))
        if "message" not in artists and "key" not in artists:
            artists["subtitle"] = subtitle(ax, view.label)
        return artists


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

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        found = layer_lines(history[self.names[0]], history, ("correlation",))
        title(ax, f"{self.heading(history)}: correlation")
        artists = draw_layers(ax, axis, found, "linear")
        if "message" in artists:
            return artists
        ax.set_ylim(-1.05, 1.05)
        return artists | zero_line(ax)
