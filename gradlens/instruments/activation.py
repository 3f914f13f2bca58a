"""Fractions of active and of dead units."""

from __future__ import annotations

from typing import ClassVar

from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import field_line
from gradlens.instruments.drawing import Artists, curves
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.style import ALARM, BLUE, ORANGE, title

MANY = 0.5
"""Fraction of dead units in a layer from which on it is an alarm."""


class ActivationInstrument(Instrument):
    """Fractions of active outputs and dead units over all layers, and of dead ones in the worst."""

    kinds: ClassVar[tuple[str, ...]] = ("OutputActivation", "GradientActivation")
    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        lines = {
            "active": field_line(records, "active"),
            "dead": field_line(records, "dead"),
            "dead, worst": field_line(records, "worst"),
        }
        worst = lines["dead, worst"]
        if worst.steps.size and worst.finite[-1]:
            share = f"worst {100 * worst.latest:.0f} % dead"
            title(ax, self.heading(history), share, worst.latest >= MANY)
        artists = curves(ax, axis, lines, [BLUE, ORANGE, ALARM], "linear", [1.6, 1.6, 1.0])
        if "message" not in artists:
            ax.set_ylim(-0.02, 1.02)
            ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        return artists
