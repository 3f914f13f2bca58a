"""Time per step."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line, durations, line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, any_finite
from gradlens.instruments.scales import log_if_wide, number_label
from gradlens.instruments.style import categorical_colors

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class TimeInstrument(Instrument):
    """Mean time per step between two records, from time stamps in seconds."""

    kinds: ClassVar[tuple[str, ...]] = ("Time",)
    title: ClassVar[str] = "Time per step"
    label: ClassVar[str] = "time"

    def content(self, history: History) -> Lines:
        stamps = {name: line(history[name]) for name in self.names}
        seconds = {name: durations(one) for name, one in stamps.items()}
        if any_finite(list(stamps.values())) and not any_finite(list(seconds.values())):
            seconds = {
                n: Line(one.steps, one.values, "needs two records") for n, one in seconds.items()
            }
        middle = _median(seconds)
        factor, unit = next((u for u in UNITS if not middle < u[0]), UNITS[-1])
        found = [Line(one.steps, one.values / factor, one.reason) for one in seconds.values()]
        latest = f"{number_label(middle / factor)} {unit}" if np.isfinite(middle) else ""
        colors = categorical_colors(len(found))
        return Lines(
            tuple(map(partial(Curve, unit=unit), seconds, found, colors)),
            scale=log_if_wide([one.values for one in found], 10),
            latest=(latest, False),
            words=f"in {unit}, median on the right" if latest else "",
        )


def _median(lines: dict[str, Line]) -> float:
    found = np.concatenate([one.values[one.finite] for one in lines.values()])
    return float(np.median(found)) if found.size else float("nan")
