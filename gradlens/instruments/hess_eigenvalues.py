"""Single eigenvalues of the curvature."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gradlens.history.histograms import percent
from gradlens.history.history import History
from gradlens.history.lines import Line, line, rows
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Lines, readout


class HessEigenvaluesInstrument(Instrument):
    """Eigenvalues of the curvature; those that have not converged are hollow points."""

    kinds: ClassVar[tuple[str, ...]] = ("HessEigenvalues",)
    title: ClassVar[str] = "Curvature eigenvalues"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        layers = curvature_lines(records)
        if not layers:
            return Lines(layers={"λ": line(records)})
        failed = [step for step, good in records.having("converged").items() if not good]
        text, alarm = readout(layers["λ1"])
        share = f"{percent(len(failed) / len(records))} unconverged"
        return Lines(
            layers=layers,
            scale="log",
            latest=(share if failed else f"λ1 {text}", alarm),
            uncertain=np.array(failed, dtype=np.float64),
        )


def curvature_lines(records: Series) -> dict[str, Line]:
    """Eigenvalues as lines ``λ1``, ``λ2``, ...; NaN where a record has fewer."""
    table, why = rows([*records.column("eigenvalues").values()]), records.reason
    return {f"λ{n}": Line(records.steps, one, why) for n, one in enumerate(table.T, start=1)}
