"""Rank of the gradient covariance for each layer."""

from __future__ import annotations

from typing import ClassVar

from gradlens.history.history import History
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import Layout, table
from gradlens.instruments.panel import Lines
from gradlens.instruments.scales import log_if_wide

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

    def content(self, history: History) -> Lines:
        found = table(history[self.names[0]], RANKS, history)
        return Lines(layers=found.lines, scale=log_if_wide([found.values.ravel()]))
