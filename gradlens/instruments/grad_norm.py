"""How long the mini-batch gradient is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history import History
from gradlens.instruments.drawing import Artists, readout, threads
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.series import Line, Records, input_to_output, line, lines, reason
from gradlens.instruments.style import INK, title


class GradNormInstrument(Instrument):
    """Gradient norm of the whole network, and of each parameter from input to output."""

    kinds: ClassVar[tuple[str, ...]] = ("GradNorm",)
    title: ClassVar[str] = "Gradient norm"
    together: ClassVar[bool] = False

    def _draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        found = lines(history[self.names[0]])
        parts = {name: found[name] for name in input_to_output(tuple(found), history)}
        whole = total(history[self.names[0]], parts)
        title(ax, self._heading(history), *readout(whole))
        return threads(ax, axis, parts, "log", {"total": (whole, INK)})


def total(records: Records, parts: Mapping[str, Line]) -> Line:
    """Root of the sum of squares over all parameters; NaN where one of them is NaN.

    A parameter without an entry at a step has no gradient there, and adds nothing.
    """
    if not parts:
        return line(records)
    entries = [value for _, value in sorted(records.items())]
    absent = [[isinstance(v, Mapping) and name not in v for v in entries] for name in parts]
    squares = np.square([one.values for one in parts.values()])
    sums = np.where(np.array(absent), 0.0, squares).sum(axis=0)
    first = next(iter(parts.values()))
    return Line(first.steps, np.sqrt(sums), reason(records.values()))
