"""The batch size at which noise and gradient are equally large."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Line, field_line
from gradlens.instruments.drawing import (
    SMOOTH_FROM,
    Artists,
    any_finite,
    band,
    beyond,
    explain_empty,
    missing,
    readout,
    thread,
)
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, fit, within_reach, without_spikes
from gradlens.instruments.series import trend
from gradlens.instruments.style import BLUE, subtitle, tint, title


class GradNoiseScaleInstrument(Instrument):
    """Gradient noise scale with the band of its confidence interval.

    Single estimates may be far too large, even infinite. They are above the range of the axis.
    """

    kinds: ClassVar[tuple[str, ...]] = ("GradNoiseScale",)
    title: ClassVar[str] = "Gradient noise scale"
    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        value, low, high = (field_line(records, name) for name in ("value", "low", "high"))
        axis.apply(ax)
        if not any_finite([value]):
            return explain_empty(ax, [value])
        smooth = trend(value, axis.warp, bridge=True)
        many = value.steps.size >= SMOOTH_FROM
        title(ax, self.heading(history), *readout(smooth if many else value))
        shown = without_spikes(value.values, log=True)
        ends = [within_reach(one.values, shown, log=True) for one in (low, high)]
        fit(ax, [shown, *ends], "log")
        artists: Artists = {"band": band(ax, axis, low, high, BLUE)}
        artists |= _value(ax, axis, value, smooth if many else None)
        artists["subtitle"] = subtitle(ax, "in samples, median on the right" if many else "samples")
        return artists | missing(ax, axis, [value]) | beyond(ax, axis, [value, high])


def _value(ax: Axes, axis: StepAxis, value: Line, smooth: Line | None) -> Artists:
    positive = Line(value.steps, np.where(value.values > 0, value.values, np.nan))
    if smooth is None:
        return {"value": thread(ax, axis, positive, BLUE, 1.6, 3)}
    # Gaps stay gaps. There are many of them if the noise is large.
    raw = thread(ax, axis, positive, tint(BLUE, 0.45), 0.6, 2)
    (front,) = ax.plot(smooth.steps, smooth.values, color=BLUE, linewidth=1.6, zorder=4)
    return {"value": raw, "value trend": front}
