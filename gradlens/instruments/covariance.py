"""Covariance of per-sample gradients, and of the inputs and output gradients of layers."""

from __future__ import annotations

import math

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line, field_line, rows
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layer_lines import layer_lines
from gradlens.instruments.layers import Layout, table
from gradlens.instruments.panel import Curve, Grid, Lines, readout
from gradlens.instruments.scales import log_if_wide, padded
from gradlens.instruments.series import input_to_output
from gradlens.instruments.style import BLUE, INK, ORANGE, PURPLE, SKY

MOST = 10


class CovarianceSpectrumInstrument(Instrument):
    """Largest eigenvalues of the gradient covariance, and its trace."""

    kinds = ("GradCovariance",)
    title = "Gradient covariance"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        trace = field_line(records, "trace")
        latest, alarm = readout(trace)
        return Lines(
            (Curve("trace", trace, INK),),
            eigenvalue_lines(records),
            scale="log",
            latest=(f"trace {latest}" if latest else "", alarm),
        )


class CovarianceRanksInstrument(Instrument):
    """Effective and stable rank of the gradient covariance."""

    kinds = ("GradCovariance",)
    title = "Covariance rank"
    label = "rank"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        curves = (
            Curve("effective", field_line(records, "effective_rank"), BLUE),
            Curve("stable", field_line(records, "stable_rank"), ORANGE),
        )
        return Lines(curves, scale=log_if_wide([one.line.values for one in curves]))


def eigenvalue_lines(records: Series, most: int = MOST) -> dict[str, Line]:
    """The largest eigenvalues as lines ``λ1``, ``λ2``, ...; NaN where a record has fewer.

    An eigenvalue below the rounding error of the largest one is a NaN, because it is noise that
    would take up most of a logarithmic axis.
    """
    table = rows([*records.column("eigenvalues").values()], most)
    largest = np.nanmax(np.abs(table), axis=1, initial=0.0, keepdims=True)
    table = np.where(table > 1e-6 * largest, table, np.nan)
    columns = [Line(records.steps, values, records.reason) for values in table.T]
    return {f"λ{n}": one for n, one in enumerate(columns, start=1) if one.finite.any()}


RANKS = Layout(part="layers", field="effective_rank", noun="layer")


class LayerRanksInstrument(Instrument):
    """Effective rank of the gradient covariance of each layer, from input to output."""

    kinds = ("GradCovariance",)
    title = "Effective rank by layer"
    label = "rank"
    secondary = True
    part = "layers"

    def content(self, history: History) -> Lines:
        found = table(history[self.names[0]], RANKS, history)
        return Lines(layers=found.lines, scale=log_if_wide([found.values.ravel()]))


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

    kinds = COVARIANCES
    aspect = "stable rank"
    label = "rank"

    def content(self, history: History) -> Lines:
        found = layer_lines(history[self.names[0]], history, ("stable_rank",))
        return Lines(layers=found, scale=log_if_wide([one.values for one in found.values()]))


class LayerConditionsInstrument(Instrument):
    """Condition numbers of the covariance, the median over layers."""

    kinds = COVARIANCES
    aspect = "condition"
    label = "ratio of eigenvalues"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        found = [_median(records, history, field) for field in CONDITIONS.values()]
        colors = (SKY, BLUE, PURPLE, ORANGE)
        return Lines(tuple(map(Curve, CONDITIONS, found, colors)), scale="log")


def _median(records: Series, history: History, field: str) -> Line:
    found = layer_lines(records, history, (field,))
    first = next(iter(found.values()))
    # ∞ is sorted behind all numbers, and the median may be ∞.
    table = np.sort([one.values for one in found.values()], axis=0)
    counts = np.isnan(table).shape[0] - np.isnan(table).sum(axis=0)
    middle = np.array([
        np.median(values[:count]) if count else math.nan
        for values, count in zip(table.T, counts, strict=True)
    ])  # fmt: skip
    return Line(first.steps, middle, first.reason)


class LayerSpectraInstrument(Instrument):
    """The largest eigenvalues of the covariance of each layer over time, in small panels."""

    kinds = COVARIANCES
    aspect = "spectra"
    secondary = True
    part = "layers"

    def content(self, history: History) -> Grid:
        records = history[self.names[0]].having(self.part)
        names = input_to_output(records.entries, history)
        found = {name: eigenvalue_lines(records.column(name)) for name in names}
        values = [one.values[one.finite] for lines in found.values() for one in lines.values()]
        joined = np.concatenate([*values, []])
        limits = padded(joined.min(), joined.max(), log=True) if joined.size else None
        parts = {
            name: Lines(layers=lines, scale="log", limits=limits, message=NONE * (not lines))
            for name, lines in found.items()
        }
        most = max((len(lines) for lines in found.values()), default=0)
        words = f"eigenvalues λ1 (dark) to λ{most} · all panels have one scale"
        return Grid(parts, words, 4, GAP)
