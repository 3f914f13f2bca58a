"""Size of the parameters."""

from __future__ import annotations

from typing import ClassVar

from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import line, rms_lines
from gradlens.instruments.drawing import Artists, threads
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, log_if_wide
from gradlens.instruments.series import input_to_output


class ParametersInstrument(Instrument):
    """Root mean square of each parameter's elements, coloured from input to output."""

    kinds: ClassVar[tuple[str, ...]] = ("Parameters",)
    title: ClassVar[str] = "Parameters, RMS"
    label: ClassVar[str] = "RMS"
    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        found = rms_lines(records) or {self.names[0]: line(records)}
        lines = {name: found[name] for name in input_to_output(tuple(found), history)}
        scale = log_if_wide([one.values for one in lines.values()])
        return threads(ax, axis, lines, scale, single_lines=self.options.single_lines)
