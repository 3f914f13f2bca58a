"""The early stopping criterion: whether gradients differ from noise."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.instruments.drawing import (
    Artists,
    any_finite,
    beyond,
    curve,
    explain_empty,
    missing,
    readout,
    zero_line,
)
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, fit, without_spikes
from gradlens.instruments.style import ALARM, BLUE, subtitle, tint, title


class EarlyStoppingInstrument(Instrument):
    """The evidence-based stopping criterion; the range in which to stop, above zero, is tinted.

    Single steps at which a few elements have almost no variance are far below the others. They are
    outside the range of the axis.
    """

    kinds: ClassVar[tuple[str, ...]] = ("EarlyStopping",)
    title: ClassVar[str] = "Early stopping"
    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        found = line(history[self.names[0]])
        axis.apply(ax)
        if not any_finite([found]):
            return explain_empty(ax, [found])
        text, alarm = readout(found)
        title(ax, self.heading(history), text, alarm or found.latest > 0)
        artists = curve(ax, axis, found, BLUE, "criterion")
        fit(ax, [without_spikes(found.values), np.array([0.0, 0.1])], "linear")
        top = ax.get_ylim()[1]
        artists["stop"] = ax.axhspan(0, top, color=tint(ALARM, 0.09), linewidth=0, zorder=0.5)
        artists["subtitle"] = subtitle(ax, "above 0 the gradient is noise: stop")
        return artists | zero_line(ax) | missing(ax, axis, [found]) | beyond(ax, axis, [found])
