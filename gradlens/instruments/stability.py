"""Sharpness and its threshold of stability."""

from __future__ import annotations

from typing import ClassVar

from gradlens.history.history import History
from gradlens.history.lines import field_line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, readout
from gradlens.instruments.style import MUTED


class StabilityInstrument(Instrument):
    """Sharpness and the threshold beyond which a quadratic loss diverges, tinted above it."""

    kinds: ClassVar[tuple[str, ...]] = ("Stability",)
    title: ClassVar[str] = "Edge of stability"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        sharpness, threshold = (field_line(records, n) for n in ("sharpness", "threshold"))
        latest, alarm = readout(field_line(records, "ratio"))
        return Lines(
            (Curve("sharpness", sharpness), Curve("threshold", threshold, MUTED, width=1.0)),
            scale="log",
            latest=(f"ratio {latest}" if latest else "", alarm),
            danger=threshold,
        )
