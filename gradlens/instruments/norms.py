"""Norms of gradients and updates, and the distance from the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Line, line, lines
from gradlens.history.series import Series
from gradlens.instruments.drawing import Artists, readout, threads
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import Scale, StepAxis
from gradlens.instruments.series import input_to_output
from gradlens.instruments.style import INK, title


class _NormsInstrument(Instrument):
    together: ClassVar[bool] = False
    scale: ClassVar[Scale] = "log"

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        found = lines(history[self.names[0]])
        parts = {name: found[name] for name in input_to_output(tuple(found), history)}
        whole = total(history[self.names[0]], parts)
        title(ax, self.heading(history), *readout(whole))
        return threads(
            ax, axis, parts, self.scale, {"total": (whole, INK)}, self.options.single_lines
        )


class GradNormInstrument(_NormsInstrument):
    """Gradient norm of the whole network, and of each parameter from input to output."""

    kinds: ClassVar[tuple[str, ...]] = ("GradNorm",)
    title: ClassVar[str] = "Gradient norm"


class UpdateSizeInstrument(_NormsInstrument):
    """Length of each step, of the whole network and of each parameter from input to output."""

    kinds: ClassVar[tuple[str, ...]] = ("UpdateSize",)
    title: ClassVar[str] = "Update size"


class DistanceInstrument(_NormsInstrument):
    """Distance from the start, of the whole network and of each parameter."""

    kinds: ClassVar[tuple[str, ...]] = ("Distance",)
    title: ClassVar[str] = "Distance from the start"
    scale: ClassVar[Scale] = "linear"


def total(records: Series, parts: Mapping[str, Line]) -> Line:
    """Root of the sum of squares over all parameters; NaN where one of them is NaN.

    A parameter without an entry at a step has no gradient there, and counts as zero.
    """
    if not parts:
        return line(records)
    steps = [*records]
    squares = np.square([one.values for one in parts.values()])
    for row, name in zip(squares, parts, strict=True):
        row[
            [
                place
                for place in np.flatnonzero(np.isnan(row))
                if _lacks(records[steps[place]], name)
            ]
        ] = 0
    first = next(iter(parts.values()))
    return Line(first.steps, np.sqrt(squares.sum(axis=0)), records.reason)


def _lacks(record: Any, name: str) -> bool:
    return isinstance(record, Mapping) and name not in record
