"""Fractions of active and of dead units."""

from __future__ import annotations

from typing import ClassVar

from gradlens.history.history import History
from gradlens.history.lines import field_line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines
from gradlens.instruments.style import ALARM, BLUE, ORANGE

MANY = 0.5
"""Fraction of dead units in a layer from which on it is an alarm."""


class ActivationInstrument(Instrument):
    """Fractions of active outputs and dead units over all layers, and of dead ones in the worst."""

    kinds: ClassVar[tuple[str, ...]] = ("OutputActivation", "GradientActivation")
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        active, dead, worst = (field_line(records, n) for n in ("active", "dead", "worst"))
        known = worst.steps.size and worst.finite[-1]
        latest = f"worst {100 * worst.latest:.0f} % dead" if known else ""
        return Lines(
            (
                Curve("active", active, BLUE),
                Curve("dead", dead, ORANGE),
                Curve("dead, worst", worst, ALARM, width=1.0),
            ),
            latest=(latest, bool(worst.latest >= MANY)),
            shares=True,
            limits=(-0.02, 1.02),
        )
