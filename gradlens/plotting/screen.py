"""A figure of a run, as somebody asks for it: which screen, which step axis, which title."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.figure import Figure

from gradlens.history.history import History
from gradlens.plotting.plotter import WIDEST, Panel, draw, layer_panels, main_panels, nothing


@dataclass(frozen=True)
class Screen:
    """All instruments of a run, or with ``layers`` those of single layers and parameters."""

    title: str
    layers: bool = False
    log_steps: bool = False

    def panels(self, history: History) -> tuple[Panel, ...]:
        """What there is to draw; ``ValueError`` says why if that is nothing."""
        found = layer_panels(history) if self.layers else main_panels(history)
        if found:
            return found
        if self.layers and main_panels(history):
            raise ValueError(
                "there is nothing by layer or parameter: track GradNorm, GradCovariance, or "
                "GradHist1d(keep_individual=True)"
            )
        raise ValueError(nothing(history))

    def draw(
        self,
        history: History,
        figure: Figure,
        panels: tuple[Panel, ...] | None = None,
        resize: bool = True,
    ) -> None:
        """Fill a figure, without regard to what is in it.

        ``panels`` are those of ``history``, or of a longer one. Without ``resize`` the figure keeps
        its size if everything is legible at that.
        """
        shown = self.panels(history) if panels is None else panels
        widest = WIDEST if self.layers else math.inf
        draw(figure, history, shown, self.title, self.log_steps, resize, widest)
