"""Instruments of steps: where they end, how long they are, and what they do to the parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Floats, line, lines, rms_lines
from gradlens.history.scalars import scalars_of
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, Shape, Shapes
from gradlens.instruments.scales import Ruler, Scale, log_if_wide
from gradlens.instruments.series import input_to_output
from gradlens.instruments.style import BLUE, INK, ORANGE, Color, Entry, tint

KEY = (Entry("all", tint(BLUE, 0.4), "box"), Entry("latest 10 %", ORANGE))
RECENT = 0.1
"""Fraction of the steps that are shown as the latest ones."""
REACH = 4.0
"""Largest distance from the minimum that is shown; steps beyond it are in the last bin."""


class AlphaInstrument(Instrument):
    """Local step sizes on their parabola, and over time.

    A step starts at −1; an optimal one ends at 0, the minimum; one that ends at 1 has the same loss
    on the other side. The histograms are of all steps and of the latest tenth, the dots are their
    means. A narrow panel has no parabola.
    """

    kinds = ("Alpha",)
    title = "Local step size α"

    def content(self, history: History) -> Lines:
        found = line(history[self.names[0]])
        return Lines(
            (Curve("α", found),),
            spiky=True,
            limits=range_of_alpha(found.values[found.finite]),
            levels=(-1.0, 0.0, 1.0),
            beside=_parabola(found.values[found.finite]) if found.finite.any() else None,
        )


def _parabola(values: Floats) -> Shapes:
    low, high = range_of_alpha(values)
    places = np.linspace(low, high, 100)
    top = 1.08 * max(low**2, high**2)
    recent = values[-max(1, round(RECENT * values.size)) :]
    edges = np.linspace(low, high, 25)
    outline = _density("recent", recent, edges, 0.55 * top, ORANGE)
    return Shapes(
        (
            _density("all", values, edges, 0.55 * top, tint(BLUE, 0.4)),
            replace(outline, kind="line"),
            Shape("parabola", places, places**2, INK, width=1.2),
            _mean("mean", values, (low, high), BLUE),
            _mean("recent mean", recent, (low, high), ORANGE),
        ),
        Ruler("", (low, high), ticks=(-1.0, 0.0, 1.0)),
        Ruler("", (0.0, top), ticks=()),
        KEY,
        share=0.42,
        title="parabola",
    )


def range_of_alpha(values: Floats) -> tuple[float, float]:
    """The range in which almost all step sizes are; it has room for those from −1 to 1."""
    low, high = np.quantile(values, (0.01, 0.99)) if values.size else (-1.0, 1.0)
    return float(np.clip(low, -REACH, -1.35)), float(np.clip(high, 1.35, REACH))


def _density(name: str, values: Floats, edges: Floats, height: float, color: Color) -> Shape:
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    heights = np.repeat(height * counts / counts.max(), 2)
    return Shape(name, np.repeat(edges, 2)[1:-1], heights, color, "area")


def _mean(name: str, values: Floats, limits: tuple[float, float], color: Color) -> Shape:
    mean = np.clip([values.mean()], *limits)
    return Shape(name, mean, mean**2, color, "points", width=4.5)


class _NormsInstrument(Instrument):
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

    kinds = ("GradNorm",)
    title = "Gradient norm"


class UpdateSizeInstrument(_NormsInstrument):
    """Length of each step, of the whole network and of each parameter from input to output."""

    kinds = ("UpdateSize",)
    title = "Update size"


class DistanceInstrument(_NormsInstrument):
    """Distance from the start, of the whole network and of each parameter."""

    kinds = ("Distance",)
    title = "Distance from the start"
    scale: ClassVar[Scale] = "linear"


class ParametersInstrument(Instrument):
    """Root mean square of each parameter's elements, coloured from input to output."""

    kinds = ("Parameters",)
    title = "Parameters, RMS"
    label = "RMS"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        found = rms_lines(records) or {self.names[0]: line(records)}
        layers = {name: found[name] for name in input_to_output(tuple(found), history)}
        return Lines(layers=layers, scale=log_if_wide([one.values for one in layers.values()]))
