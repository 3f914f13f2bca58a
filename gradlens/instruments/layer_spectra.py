"""Covariance of layers' inputs and output gradients: ranks, condition numbers, spectra."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line
from gradlens.history.series import Series
from gradlens.instruments.covariance import eigenvalue_lines
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layer_lines import layer_lines
from gradlens.instruments.layers import in_order
from gradlens.instruments.panel import Curve, Grid, Lines
from gradlens.instruments.scales import log_if_wide
from gradlens.instruments.style import BLUE, ORANGE, PURPLE, SKY

COVARIANCES = ("InputCovariance", "OutputGradientCovariance")
CONDITIONS = {
    "20 %": "condition_20",
    "50 %": "condition_50",
    "80 %": "condition_80",
    "all": "condition",
}
NONE = "no eigenvalue is a number"
GAP = (30.0, 32.0)
"""Points between small panels, across and up."""


class LayerStableRanksInstrument(Instrument):
    """Stable rank of the covariance of each layer's inputs, or gradients at its outputs."""

    kinds: ClassVar[tuple[str, ...]] = COVARIANCES
    aspect: ClassVar[str] = "stable rank"
    label: ClassVar[str] = "rank"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        found = layer_lines(history[self.names[0]], history, ("stable_rank",))
        return Lines(layers=found.lines, scale=log_if_wide([found.table.ravel()]))


class LayerConditionsInstrument(Instrument):
    """Condition numbers of the covariance, the median over layers."""

    kinds: ClassVar[tuple[str, ...]] = COVARIANCES
    aspect: ClassVar[str] = "condition"
    label: ClassVar[str] = "ratio of eigenvalues"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        found = [_median(records, history, field) for field in CONDITIONS.values()]
        colors = (SKY, BLUE, PURPLE, ORANGE)
        return Lines(tuple(map(Curve, CONDITIONS, found, colors)), scale="log")


def _median(records: Series, history: History, field: str) -> Line:
    found = layer_lines(records, history, (field,))
    first = next(iter(found.lines.values()))
    # ∞ is sorted behind all numbers, and the median may be ∞.
    table = np.sort(found.table, axis=0)
    counts = np.isnan(table).shape[0] - np.isnan(table).sum(axis=0)
    middle = np.array([
        np.median(values[:count]) if count else math.nan
        for values, count in zip(table.T, counts, strict=True)
    ])  # fmt: skip
    return Line(first.steps, middle, first.reason)


class LayerSpectraInstrument(Instrument):
    """The largest eigenvalues of the covariance of each layer over time, in small panels."""

    kinds: ClassVar[tuple[str, ...]] = COVARIANCES
    aspect: ClassVar[str] = "spectra"
    together: ClassVar[bool] = False
    secondary: ClassVar[bool] = True
    part: ClassVar[str] = "layers"
    columns: ClassVar[int] = 4
    width: ClassVar[float] = 4.0

    def content(self, history: History) -> Grid:
        records = history[self.names[0]].having(self.part)
        names = in_order(records.entries, history)
        found = {name: eigenvalue_lines(records.column(name)) for name in names}
        values = [one.values[one.finite] for lines in found.values() for one in lines.values()]
        joined = np.concatenate([*values, []])
        limits = (float(joined.min()), float(joined.max())) if joined.size else None
        parts = {
            name: Lines(layers=lines, scale="log", limits=limits, message=NONE * (not lines))
            for name, lines in found.items()
        }
        most = max((len(lines) for lines in found.values()), default=0)
        words = f"eigenvalues λ1 (dark) to λ{most} · all panels have one scale"
        return Grid(parts, self.columns, words, GAP)
