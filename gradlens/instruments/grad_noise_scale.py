"""The batch size at which noise and gradient are equally large."""

from __future__ import annotations

from typing import ClassVar

from gradlens.history.history import History
from gradlens.history.lines import field_line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, readout
from gradlens.instruments.series import smooth


class GradNoiseScaleInstrument(Instrument):
    """Gradient noise scale with the band of its confidence interval.

    Single estimates may be far too large, even infinite. They are above the range of the axis.
    """

    kinds: ClassVar[tuple[str, ...]] = ("GradNoiseScale",)
    title: ClassVar[str] = "Gradient noise scale"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        value, low, high = (field_line(records, name) for name in ("value", "low", "high"))
        middle = smooth(value, bridge=True)
        many = middle is not value
        return Lines(
            (Curve("noise scale", value, spreads=((low, high),), unit="samples"),),
            scale="log",
            latest=readout(middle),
            words="in samples, median on the right" if many else "samples",
            spiky=True,
        )
