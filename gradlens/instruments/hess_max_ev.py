"""The largest eigenvalue of the Hessian."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line, line
from gradlens.history.setup import threshold_at, threshold_formula
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, readout
from gradlens.instruments.scales import log_if_far, number_label
from gradlens.instruments.series import in_force
from gradlens.instruments.style import MUTED

FAR = 5.0
"""How many times the largest eigenvalue a threshold may be to be drawn; others are only named."""


class HessMaxEVInstrument(Instrument):
    """Largest eigenvalue of the Hessian, which may be negative.

    If the run's optimizer is SGD, there is a line at the threshold of its learning rate and
    momentum, above which it is unstable. Other optimizers have none for this eigenvalue.
    """

    kinds: ClassVar[tuple[str, ...]] = ("HessMaxEV",)
    title: ClassVar[str] = "Largest Hessian eigenvalue"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        found = line(history[self.names[0]])
        formula, threshold = _threshold(history, found)
        largest = np.abs(found.values[found.finite]).max(initial=0)
        known = threshold.values[threshold.finite]
        near = bool(known.size) and bool(known.min() <= FAR * largest)
        curves = [Curve("λ₁", found), *([Curve(formula, threshold, MUTED)] if near else [])]
        far = f" · {formula} = {number_label(known[-1])}, far above" if known.size else ""
        return Lines(
            tuple(curves),
            scale=log_if_far([one.line.values for one in curves]),
            latest=readout(found),
            words=f"λ₁ of the mini-batch{far}",
        )


def _threshold(history: History, found: Line) -> tuple[str, Line]:
    """The formula of the threshold, and the threshold; NaN where none is known."""
    setups = history.facts.setups
    rates = _learning_rates(history, found)
    began = np.array([*setups], dtype=np.float64)
    places = np.searchsorted(began, rates.steps, side="right") - 1
    every = [*setups.values()]
    values = [
        threshold_at(every[max(place, 0)], rate) if every else np.nan
        for place, rate in zip(places, rates.values, strict=True)
    ]
    threshold = Line(rates.steps, np.array(values, dtype=np.float64))
    formula = threshold_formula(every[-1]) if every and every[-1].groups else ""
    return formula, threshold


def _learning_rates(history: History, found: Line) -> Line:
    """Those that the optimizer had, or else those that the training loop has logged."""
    table = history.facts.steps
    if "lr" not in table.names:
        return in_force("learning_rate", found.steps, history)
    last = np.searchsorted(table.steps, found.steps, side="right") - 1
    rates = table["lr"].astype(np.float64)
    return Line(found.steps[last >= 0], rates[last[last >= 0]])
