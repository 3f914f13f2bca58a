"""Single eigenvalues of the curvature."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from gradlens.history.histograms import percent
from gradlens.history.history import History
from gradlens.history.lines import Floats, Line, line, rows
from gradlens.history.series import Series
from gradlens.instruments.drawing import Artists, readout, threads
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.series import thin
from gradlens.instruments.style import MUTED, PAPER, title

FEW = 15
"""Columns for hollow points; more of them would cover the lines."""


class HessEigenvaluesInstrument(Instrument):
    """Eigenvalues of the curvature; those that have not converged are hollow points."""

    kinds: ClassVar[tuple[str, ...]] = ("HessEigenvalues",)
    title: ClassVar[str] = "Curvature eigenvalues"
    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        lines = curvature_lines(records)
        failed = [step for step, good in records.having("converged").items() if not good]
        if lines:
            text, alarm = readout(lines["λ1"])
            share = percent(len(failed) / len(records))
            text = f"{share} unconverged" if failed else f"λ1 {text}"
            title(ax, self.heading(history), text, alarm)
        artists = threads(ax, axis, lines or {"λ": line(records)}, "log")
        steps = np.array(failed, dtype=np.float64)
        for name, one in lines.items() if failed and "message" not in artists else ():
            artists[f"{name} not converged"] = _hollow(ax, axis, one, steps)
        return artists


def curvature_lines(records: Series) -> dict[str, Line]:
    """Eigenvalues as lines ``λ1``, ``λ2``, ...; NaN where a record has fewer."""
    table, why = rows([*records.column("eigenvalues").values()]), records.reason
    return {f"λ{n}": Line(records.steps, one, why) for n, one in enumerate(table.T, start=1)}


def _hollow(ax: Axes, axis: StepAxis, one: Line, steps: Floats) -> Artist:
    chosen = np.isin(one.steps, steps)
    shown = thin(one.steps[chosen], one.values[chosen], columns=FEW, warp=axis.warp)
    (artist,) = ax.plot(
        *shown, linestyle="none", marker="o", markersize=2.8, markerfacecolor=PAPER,
        markeredgecolor=MUTED, markeredgewidth=0.8, zorder=4,
    )  # fmt: skip
    return artist
