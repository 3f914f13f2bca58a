"""The batch size that suits the learning rate, and the one in use."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.history.view import GROUPS_OF_LOGGED, Group
from gradlens.instruments.drawing import Artists, curves, readout
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.series import in_force
from gradlens.instruments.style import MUTED, Color, categorical_colors, subtitle, title

IN_USE = "batch_size"


class BatchSizeInstrument(Instrument):
    """The batch size that CABS suggests, and the one in use if the training loop has logged it."""

    kinds: ClassVar[tuple[str, ...]] = ("CABS",)
    logged: ClassVar[tuple[str, ...]] = (IN_USE,)
    home: ClassVar[Group] = GROUPS_OF_LOGGED[IN_USE]
    title: ClassVar[str] = "Batch size"
    label: ClassVar[str] = "samples"

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        suggested = {name: line(history[name]) for name in self.names if name != IN_USE}
        steps = [one.steps for one in suggested.values()] or [line(history[IN_USE]).steps]
        used = in_force(IN_USE, np.unique(np.concatenate(steps)), history)
        lines = suggested | ({"in use": used} if used.steps.size else {})
        title(ax, self.title, *readout(next(iter(lines.values()))))
        colors: list[Color] = [*categorical_colors(len(suggested)), MUTED]
        artists = curves(ax, axis, lines, colors[: len(lines)], "log")
        if len(lines) == 1:
            artists["subtitle"] = subtitle(ax, "suggested by CABS" if suggested else "in use")
        return artists
