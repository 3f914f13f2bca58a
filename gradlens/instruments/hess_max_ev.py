"""The largest eigenvalue of the Hessian."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Line, line
from gradlens.instruments.drawing import Artists, curves, readout, zero_line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, log_if_far
from gradlens.instruments.series import in_force
from gradlens.instruments.style import BLUE, MUTED, subtitle, title


class HessMaxEVInstrument(Instrument):
    """Largest eigenvalue of the Hessian, which may be negative.

    If the training loop has logged the learning rate η, there is a line at 2/η, above which plain
    gradient descent on a mean loss is unstable.
    """

    kinds: ClassVar[tuple[str, ...]] = ("HessMaxEV",)
    title: ClassVar[str] = "Largest Hessian eigenvalue"
    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        found = line(history[self.names[0]])
        title(ax, self.heading(history), *readout(found))
        lines = {"λ₁": found} | _threshold(history, found)
        scale = log_if_far([one.values for one in lines.values()])
        artists = curves(ax, axis, lines, [BLUE, MUTED][: len(lines)], scale)
        if "message" in artists:
            return artists
        alone = {"subtitle": subtitle(ax, "λ₁ of the mini-batch")} if len(lines) == 1 else {}
        return artists | zero_line(ax) | alone


def _threshold(history: History, found: Line) -> dict[str, Line]:
    rates = in_force("learning_rate", found.steps, history)
    known = Line(rates.steps, 2 / np.where(rates.values > 0, rates.values, np.nan))
    useful = found.finite.any() and known.finite.any()
    return {"2/η, descent on a mean loss": known} if useful else {}
