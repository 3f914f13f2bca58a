"""Signal to noise of the gradient."""

from __future__ import annotations

from typing import ClassVar

from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.instruments.drawing import Artists, curves, readout
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.series import line
from gradlens.instruments.style import categorical_colors, subtitle, title


class MeanGSNRInstrument(Instrument):
    """Mean gradient signal-to-noise ratio."""

    kinds: ClassVar[tuple[str, ...]] = ("MeanGSNR",)
    title: ClassVar[str] = "Mean GSNR"

    def _draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        lines = {name: line(history[name]) for name in self.names}
        artists = curves(ax, axis, lines, categorical_colors(len(lines)), "log")
        if len(lines) == 1:
            title(ax, self.title, *readout(lines[self.names[0]]))
            artists["subtitle"] = subtitle(ax, "squared mean over variance of gradient elements")
        return artists
