"""Spectrum and ranks of the covariance of per-sample gradients."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Line, field_line, rows
from gradlens.history.series import Series
from gradlens.instruments.drawing import Artists, curves, readout, threads
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, log_if_wide
from gradlens.instruments.style import BLUE, INK, ORANGE, title

MOST = 10


class CovarianceSpectrumInstrument(Instrument):
    """Largest eigenvalues of the gradient covariance, and its trace."""

    kinds: ClassVar[tuple[str, ...]] = ("GradCovariance",)
    title: ClassVar[str] = "Gradient covariance"
    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        trace = field_line(records, "trace")
        latest, alarm = readout(trace)
        title(ax, self.heading(history), f"trace {latest}" if latest else "", alarm)
        return threads(ax, axis, eigenvalue_lines(records), "log", {"trace": (trace, INK)})


class CovarianceRanksInstrument(Instrument):
    """Effective and stable rank of the gradient covariance."""

    kinds: ClassVar[tuple[str, ...]] = ("GradCovariance",)
    title: ClassVar[str] = "Covariance rank"
    label: ClassVar[str] = "rank"
    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        lines = {
            "effective": field_line(records, "effective_rank"),
            "stable": field_line(records, "stable_rank"),
        }
        scale = log_if_wide([one.values for one in lines.values()])
        return curves(ax, axis, lines, [BLUE, ORANGE], scale)


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
