"""Rank of the gradient covariance for each layer."""

from __future__ import annotations

from typing import ClassVar

from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Line
from gradlens.instruments.drawing import Artists, threads
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import Layout, table
from gradlens.instruments.scales import StepAxis, log_if_wide

RANKS = Layout(part="layers", field="effective_rank", noun="layer")


class LayerRanksInstrument(Instrument):
    """Effective rank of the gradient covariance of each layer, from input to output."""

    kinds: ClassVar[tuple[str, ...]] = ("GradCovariance",)
    title: ClassVar[str] = "Effective rank by layer"
    label: ClassVar[str] = "rank"
    together: ClassVar[bool] = False
    secondary: ClassVar[bool] = True
    part: ClassVar[str] = "layers"
    width: ClassVar[float] = 2.0

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        found = table(history[self.names[0]], RANKS, history)
        lines = {
            name: Line(found.steps, values, found.reason)
            for name, values in zip(found.names, found.values, strict=True)
        }
        scale = log_if_wide([one.values for one in lines.values()])
        return threads(ax, axis, lines, scale, single_lines=self.options.single_lines)
