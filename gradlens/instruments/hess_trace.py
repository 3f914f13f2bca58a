"""Estimated trace of the Hessian."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history import History
from gradlens.instruments.covariance import field_line
from gradlens.instruments.drawing import (
    Artists,
    any_finite,
    band,
    curve,
    explain_empty,
    missing,
    readout,
)
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import Scale, StepAxis, fit
from gradlens.instruments.series import Floats
from gradlens.instruments.style import BLUE, MUTED, subtitle, title


class HessTraceInstrument(Instrument):
    """Trace of the Hessian with the band of its estimation error."""

    kinds: ClassVar[tuple[str, ...]] = ("HessTrace",)
    title: ClassVar[str] = "Hessian trace"
    together: ClassVar[bool] = False

    def _draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        trace, low, high = (field_line(records, name) for name in ("trace", "low", "high"))
        title(ax, self._heading(history), *readout(trace))
        axis.apply(ax)
        if not any_finite([trace]):
            return explain_empty(ax, [trace])
        artists = curve(ax, axis, trace, BLUE, "trace")
        fit(ax, [trace.values, low.values, high.values], _scale(trace.values))
        artists["band"] = band(ax, axis, low, high, BLUE)
        if ax.get_ylim()[0] < 0 < ax.get_ylim()[1]:
            artists["zero"] = ax.axhline(0, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)
        artists["subtitle"] = subtitle(ax, "band: error of the estimate")
        return artists | missing(ax, axis, [trace])


def _scale(values: Floats) -> Scale:
    # Against the median: noise may bring single traces close to zero.
    sizes = np.abs(values[np.isfinite(values)])
    return "log" if sizes.max() > 30 * np.median(sizes) else "linear"
