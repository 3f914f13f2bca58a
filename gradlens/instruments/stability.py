"""Sharpness and its threshold of stability."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Line, field_line
from gradlens.instruments.drawing import SMOOTH_FROM, Artists, curves, readout
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.series import thin, trend
from gradlens.instruments.style import ALARM, BLUE, MUTED, tint, title


class StabilityInstrument(Instrument):
    """Sharpness and the threshold beyond which a quadratic loss diverges, tinted above it."""

    kinds: ClassVar[tuple[str, ...]] = ("Stability",)
    title: ClassVar[str] = "Edge of stability"
    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        latest, alarm = readout(field_line(records, "ratio"))
        title(ax, self.heading(history), f"ratio {latest}" if latest else "", alarm)
        lines = {name: field_line(records, name) for name in ("sharpness", "threshold")}
        artists = curves(ax, axis, lines, [BLUE, MUTED], "log", widths=[1.6, 1.0])
        threshold = lines["threshold"]
        if "message" in artists or not threshold.finite.any():
            return artists
        return artists | {"unstable": _above(ax, axis, threshold)}


def _above(ax: Axes, axis: StepAxis, threshold: Line) -> Artist:
    many = threshold.finite.sum() >= SMOOTH_FROM
    drawn = trend(threshold, axis.warp) if many else threshold
    steps, values = thin(drawn.steps, drawn.values, warp=axis.warp)
    top = ax.get_ylim()[1]
    return ax.fill_between(
        steps, np.minimum(values, top), top, color=tint(ALARM, 0.09), linewidth=0, zorder=0.5
    )
