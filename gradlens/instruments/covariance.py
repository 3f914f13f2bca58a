"""Spectrum and ranks of the covariance of per-sample gradients."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line, field_line, rows
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, readout
from gradlens.instruments.scales import log_if_wide
from gradlens.instruments.style import BLUE, INK, ORANGE

MOST = 10


class CovarianceSpectrumInstrument(Instrument):
    """Largest eigenvalues of the gradient covariance, and its trace."""

    kinds: ClassVar[tuple[str, ...]] = ("GradCovariance",)
    title: ClassVar[str] = "Gradient covariance"
    together: ClassVar[bool] = False

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

    kinds: ClassVar[tuple[str, ...]] = ("GradCovariance",)
    title: ClassVar[str] = "Covariance rank"
    label: ClassVar[str] = "rank"
    together: ClassVar[bool] = False

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
