"""The early stopping criterion: whether gradients differ from noise."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line, line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, readout


class EarlyStoppingInstrument(Instrument):
    """The evidence-based stopping criterion; the range in which to stop, above zero, is tinted.

    Single steps at which a few elements have almost no variance are far below the others. They are
    outside the range of the axis.
    """

    kinds: ClassVar[tuple[str, ...]] = ("EarlyStopping",)
    title: ClassVar[str] = "Early stopping"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        found = line(history[self.names[0]])
        text, alarm = readout(found)
        return Lines(
            (Curve("criterion", found),),
            latest=(text, alarm or found.latest > 0),
            words="above 0 the gradient is noise: stop",
            spiky=True,
            room=(0.0, 0.1),
            danger=Line(found.steps, np.zeros_like(found.steps)),
        )
