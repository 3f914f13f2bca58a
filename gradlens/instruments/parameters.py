"""Size of the parameters."""

from __future__ import annotations

from typing import ClassVar

from gradlens.history.history import History
from gradlens.history.lines import line, rms_lines
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Lines
from gradlens.instruments.scales import log_if_wide
from gradlens.instruments.series import input_to_output


class ParametersInstrument(Instrument):
    """Root mean square of each parameter's elements, coloured from input to output."""

    kinds: ClassVar[tuple[str, ...]] = ("Parameters",)
    title: ClassVar[str] = "Parameters, RMS"
    label: ClassVar[str] = "RMS"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        found = rms_lines(records) or {self.names[0]: line(records)}
        layers = {name: found[name] for name in input_to_output(tuple(found), history)}
        return Lines(layers=layers, scale=log_if_wide([one.values for one in layers.values()]))
