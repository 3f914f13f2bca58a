"""Time per step."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Line, durations, line
from gradlens.instruments.drawing import Artists, any_finite, curves
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, log_if_wide, number_label
from gradlens.instruments.style import categorical_colors, subtitle, title

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class TimeInstrument(Instrument):
    """Mean time per step between two records, from time stamps in seconds."""

    kinds: ClassVar[tuple[str, ...]] = ("Time",)
    title: ClassVar[str] = "Time per step"
    label: ClassVar[str] = "time"

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        stamps = {name: line(history[name]) for name in self.names}
        seconds = {name: durations(one) for name, one in stamps.items()}
        if any_finite(list(stamps.values())) and not any_finite(list(seconds.values())):
            seconds = {
                n: Line(one.steps, one.values, "needs two records") for n, one in seconds.items()
            }
        middle = _median(seconds)
        factor, unit = next((u for u in UNITS if not middle < u[0]), UNITS[-1])
        lines = {n: Line(one.steps, one.values / factor, one.reason) for n, one in seconds.items()}
        scale = log_if_wide([one.values for one in lines.values()], 10)
        artists = curves(ax, axis, lines, categorical_colors(len(lines)), scale)
        if np.isfinite(middle):
            title(ax, self.title, f"{number_label(middle / factor)} {unit}")
        if len(lines) == 1 and np.isfinite(middle):
            artists["subtitle"] = subtitle(ax, f"in {unit}, median on the right")
        return artists


def _median(lines: dict[str, Line]) -> float:
    found = np.concatenate([one.values[one.finite] for one in lines.values()])
    return float(np.median(found)) if found.size else float("nan")
