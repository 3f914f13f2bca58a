"""Size and rank of the gradient covariance for each layer."""

from __future__ import annotations

from typing import ClassVar

from matplotlib.axes import Axes

from gradlens.history import History
from gradlens.instruments.covariance import layer_lines
from gradlens.instruments.drawing import Artists, threads
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, log_if_wide


class LayerTraceInstrument(Instrument):
    """Trace of the gradient covariance of each layer, from input to output."""

    kinds: ClassVar[tuple[str, ...]] = ("GradCovariance",)
    title: ClassVar[str] = "Covariance trace by layer"
    together: ClassVar[bool] = False
    part: ClassVar[str] = "layers"
    width: ClassVar[float] = 2.0

    def _draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        return threads(ax, axis, layer_lines(history[self.names[0]], "trace"), "log")


class LayerRanksInstrument(Instrument):
    """Effective rank of the gradient covariance of each layer, from input to output."""

    kinds: ClassVar[tuple[str, ...]] = ("GradCovariance",)
    title: ClassVar[str] = "Effective rank by layer"
    together: ClassVar[bool] = False
    part: ClassVar[str] = "layers"
    width: ClassVar[float] = 2.0

    def _draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        lines = layer_lines(history[self.names[0]], "effective_rank")
        scale = log_if_wide([one.values for one in lines.values()])
        return threads(ax, axis, lines, scale)
