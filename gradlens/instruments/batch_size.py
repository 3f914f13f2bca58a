"""The batch size that suits the learning rate, and the one in use."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.history.view import GROUPS_OF_LOGGED, Group
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, readout
from gradlens.instruments.series import in_force
from gradlens.instruments.style import MUTED, categorical_colors

IN_USE = "batch_size"


class BatchSizeInstrument(Instrument):
    """The batch size that CABS suggests, and the one in use if the training loop has logged it."""

    kinds: ClassVar[tuple[str, ...]] = ("CABS",)
    logged: ClassVar[tuple[str, ...]] = (IN_USE,)
    home: ClassVar[Group] = GROUPS_OF_LOGGED[IN_USE]
    title: ClassVar[str] = "Batch size"
    label: ClassVar[str] = "samples"

    def content(self, history: History) -> Lines:
        suggested = {name: line(history[name]) for name in self.names if name != IN_USE}
        steps = [one.steps for one in suggested.values()] or [line(history[IN_USE]).steps]
        used = in_force(IN_USE, np.unique(np.concatenate(steps)), history)
        colors = categorical_colors(len(suggested))
        in_samples = partial(Curve, unit="samples")
        curves = [*map(in_samples, suggested, suggested.values(), colors)]
        if used.steps.size:
            curves.append(in_samples("in use", used, MUTED))
        return Lines(
            tuple(curves),
            scale="log",
            latest=readout(curves[0].line),
            words="suggested by CABS" if suggested else "in use",
        )
