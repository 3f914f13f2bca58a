"""A screen of a run: which panels, which step axis, which title."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.figure import Figure

from gradlens.history.history import History
from gradlens.instruments import BUILT_IN, Instrument
from gradlens.plotting.layout import WIDEST
from gradlens.plotting.panels import Panel, layer_panels, main_panels, nothing
from gradlens.plotting.rendering import draw


@dataclass(frozen=True)
class Screen:
    """All panels of a run, or with ``layers`` those of single layers and parameters."""

    title: str
    layers: bool = False
    log_steps: bool = False
    instruments: tuple[Instrument, ...] = BUILT_IN

    def panels(self, history: History) -> tuple[Panel, ...]:
        """The panels to draw; ``ValueError`` gives the reason if there are none."""
        find = layer_panels if self.layers else main_panels
        found = find(history, self.instruments)
        if found:
            return found
        if self.layers and main_panels(history, self.instruments):
            raise ValueError(
                "there is nothing by layer or parameter: track GradNorm, GradCovariance, "
                "NormTest(by='layer'), or GradHist1d(keep_individual=True)"
            )
        raise ValueError(nothing(history))

    def draw(
        self,
        history: History,
        figure: Figure,
        panels: tuple[Panel, ...] | None = None,
        resize: bool = True,
    ) -> None:
        """Draw on a figure, which is emptied first.

        ``panels`` are those of ``history``, or of a longer one. Without ``resize`` the figure keeps
        its size if everything can be read at that.
        """
        shown = self.panels(history) if panels is None else panels
        widest = WIDEST if self.layers else math.inf
        draw(figure, history, shown, self.title, self.log_steps, resize, widest)
