"""Norms of gradients and updates, and the distance from the start."""

from __future__ import annotations

from typing import ClassVar

from gradlens.history.history import History
from gradlens.history.lines import lines
from gradlens.history.scalars import scalars_of
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines
from gradlens.instruments.scales import Scale
from gradlens.instruments.series import input_to_output
from gradlens.instruments.style import INK


class _NormsInstrument(Instrument):
    together: ClassVar[bool] = False
    scale: ClassVar[Scale] = "log"

    def content(self, history: History) -> Lines:
        name = self.names[0]
        found = lines(history[name])
        (total,) = scalars_of(name, history[name], history.sources.get(name), history.parameters)
        return Lines(
            (Curve("total", total.line, INK),),
            {name: found[name] for name in input_to_output(tuple(found), history)},
            scale=self.scale,
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
