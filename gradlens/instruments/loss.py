"""The loss of each mini-batch."""

from __future__ import annotations

from typing import ClassVar

from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.instruments.drawing import Artists, curves, readout
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, log_if_wide
from gradlens.instruments.series import line
from gradlens.instruments.style import categorical_colors, subtitle, title


class LossInstrument(Instrument):
    """The mini-batch loss; logarithmic once it has fallen far."""

    kinds: ClassVar[tuple[str, ...]] = ("Loss",)
    title: ClassVar[str] = "Loss"

    def _draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        lines = {name: line(history[name]) for name in self.names}
        scale = log_if_wide([one.values for one in lines.values()])
        artists = curves(ax, axis, lines, categorical_colors(len(lines)), scale)
        if len(lines) == 1:
            title(ax, self.title, *readout(lines[self.names[0]]))
            artists["subtitle"] = subtitle(ax, "of the mini-batch")
        return artists
