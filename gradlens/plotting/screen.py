"""A screen of a run: which panels, which step axis, which title."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from matplotlib.figure import Figure

from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.instruments import BUILT_IN, Instrument, Options
from gradlens.instruments.instrument import step_axis
from gradlens.instruments.panel import Panel
from gradlens.instruments.scales import StepAxis
from gradlens.plotting.findings import findings_of
from gradlens.plotting.layout import WIDEST, FigureSize, Look, columns
from gradlens.plotting.panels import (
    layer_parts,
    limited,
    main_parts,
    named_parts,
    nothing,
    panels,
)
from gradlens.plotting.rendering import draw, draw_empty, words_of
from gradlens.spelling import near


@dataclass(frozen=True)
class Screen:
    """All panels of a run, or with ``layers`` those of single layers and parameters.

    With ``findings``, what is wrong with the run is marked in them. ``names`` chooses single panels
    by title; ``size``, ``look`` and ``options`` are those of ``CockpitPlotter.plot``.
    """

    title: str
    layers: bool = False
    log_steps: bool = False
    instruments: tuple[Instrument, ...] = BUILT_IN
    findings: bool = True
    names: tuple[str, ...] = ()
    size: FigureSize = None
    look: Look = "screen"
    options: Options = field(default=Options())

    def __post_init__(self) -> None:
        given: object = self.size
        if isinstance(given, str):
            raise TypeError(
                f"size={given!r}: pass inches, as in size=3.3, or size=(6.75, 2.5) with a height"
            )
        if self.look not in get_args(Look):
            raise ValueError(f"there is no style {self.look!r}{near(self.look, get_args(Look))}")

    def panels(self, history: History) -> tuple[Panel, ...]:
        """The panels to draw, of which there may be none."""
        return panels(self.parts(history), history)

    def parts(self, history: History) -> tuple[Instrument, ...]:
        """The instruments to draw, once for each panel."""
        instruments = [replace(one, options=self.options) for one in self.instruments]
        if self.names:
            return limited(named_parts(history, self.names, instruments))
        return limited((layer_parts if self.layers else main_parts)(history, instruments))

    def lacks(self, history: History) -> str:
        """Why there is nothing to draw; empty if there is something."""
        if self.parts(history):
            return ""
        if self.layers and main_parts(history, self.instruments):
            return (
                "there is nothing by layer or parameter: track GradNorm, GradCovariance, "
                "NormTest(by='layer'), or GradHist1d(keep_individual=True)"
            )
        return nothing(history)

    def marked(self, history: History) -> tuple[Finding, ...]:
        """What is wrong with a run, if that is to be marked."""
        return findings_of(history) if self.findings else ()

    def draw(
        self,
        history: History,
        figure: Figure,
        panels: tuple[Panel, ...] | None = None,
        resize: bool = True,
        findings: Sequence[Finding] | None = None,
        axis: StepAxis | None = None,
    ) -> None:
        """Draw on a figure, which is emptied first.

        ``panels``, ``findings`` and the ``axis`` are those of ``history``, or of a longer one.
        Without ``resize`` the figure keeps its size if everything can be read at that.
        """
        shown = self.panels(history) if panels is None else panels
        if not shown:
            draw_empty(figure, self.title, self.lacks(history), resize, self.look)
            return
        widest = min(WIDEST if self.layers else math.inf, columns(self.size))
        found = self.marked(history) if findings is None else findings
        draw(
            figure, shown, words_of(history, self.title),
            axis or step_axis(history, self.log_steps), resize, widest, found, self.look, self.size,
            history.steps[-1],
        )  # fmt: skip
