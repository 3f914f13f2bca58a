"""Norm, inner product and orthogonality test: the noise of the mini-batch gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line, network_line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.numbers import short_labels
from gradlens.instruments.panel import (
    Curve,
    Lines,
    LineStyle,
    Shape,
    Shapes,
)
from gradlens.instruments.scales import Ruler
from gradlens.instruments.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    Color,
    tint,
)

SHARE = 0.35
"""The picture's share of the width."""
SHORT = {"NormTest": "norm θ", "InnerTest": "inner θ", "OrthoTest": "ortho ν"}


# θ² of the norm test is the sum of the other two squares. Its line is wide and those of the others
# are narrow, and that of ν is dashed, so that each can be seen where they are almost equal.
LOOKS: Mapping[str, tuple[Color, float, LineStyle]] = {
    "NormTest": (BLUE, 3.6, "-"),
    "InnerTest": (ORANGE, 1.5, "-"),
    "OrthoTest": (GREEN, 1.5, (0, (3.0, 1.5))),
}
DOTTED: LineStyle = (0, (1.0, 1.2))


class GradientTestsInstrument(Instrument):
    """The three gradient tests as a picture of the latest step, and over time.

    The picture shows the mean gradient as an arrow of length one. The circle around its tip has
    the radius θ of the norm test, the bands have the half-widths θ of the inner product test
    (along the arrow) and ν of the orthogonality test (across it). If the arrow's origin is in the
    circle, the noise is larger than the gradient. Of several tests of a kind, the bands are those
    of the first; circles and lines are drawn for all. A narrow panel has no picture.
    """

    together = True
    kinds = ("NormTest", "InnerTest", "OrthoTest")
    title = "Gradient tests"
    label = "θ, ν"

    def content(self, history: History) -> Lines:
        kinds = [self.kind(history, name) for name in self.names]
        labels = short_labels(self.names, kinds, SHORT)
        places = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
        curves = tuple(
            _curve(label, network_line(history[name]), kind, place, len(kinds) > 1)
            for label, name, kind, place in zip(labels, self.names, kinds, places, strict=True)
        )
        known = [(k, c) for k, c in zip(kinds, curves, strict=True) if c.line.finite.any()]
        return Lines(curves, scale="log", levels=(1.0,), beside=_picture(known) if known else None)


def _curve(label: str, found: Line, kind: str, place: int, several: bool) -> Curve:
    """The line of a test; ``place`` counts those of its kind, of which the second is pale."""
    color, width, style = LOOKS[kind]
    if place:
        return Curve(label, found, tint(color, 0.5), 1.4, DOTTED)
    return Curve(label, found, color, width if several else 1.6, style)


def _picture(tests: Sequence[tuple[str, Curve]]) -> Shapes:
    """The tests of each kind at their latest steps; all have numbers."""
    values = [float(one.line.values[one.line.finite][-1]) for _, one in tests]
    step = max(float(one.line.steps[one.line.finite][-1]) for _, one in tests)
    kinds = [kind for kind, _ in tests]
    first = {kind: values[kinds.index(kind)] for kind in kinds}
    reach = max(values)
    left, right = min(0.0, 1 - reach), 1 + max(reach, 0.1)
    half = 0.57 * max(right - left, 2 * reach)
    low, high = (left + right) / 2 - half, (left + right) / 2 + half
    bands: list[Shape] = []
    circles: list[Shape] = []
    if "OrthoTest" in first:
        ends = (-first["OrthoTest"], first["OrthoTest"])
        bands.append(_band("ortho band", (low, high), ends, GREEN))
    if "InnerTest" in first:
        ends = (1 - first["InnerTest"], 1 + first["InnerTest"])
        bands.append(_band("inner band", ends, (-half, half), ORANGE))
    turns, zeros = np.linspace(0, 2 * np.pi, 100), np.zeros(2)
    for (kind, one), radius in zip(tests, values, strict=True):
        if kind == "NormTest":
            name = f"norm circle {one.name}" if circles else "norm circle"
            x, y = 1 + radius * np.cos(turns), radius * np.sin(turns)
            circles.append(Shape(name, x, y, one.color, width=1.5, style=one.style or "-"))
    arrow = Shape("mean gradient", np.array([0.0, 1.0]), zeros, INK, "arrow", width=1.2)
    origin = Shape("origin", zeros[:1], zeros[:1], INK, "points", width=3.0)
    return Shapes(
        (*bands, *circles, arrow, origin),
        Ruler("dot in circle: noise > gradient", (low, high), ticks=(0.0, 1.0)),
        Ruler("", (-half, half), ticks=()),
        words=f"step {step:,.0f}",
        equal=True,
        share=SHARE,
        title="latest step",
    )


def _band(name: str, x: tuple[float, float], y: tuple[float, float], color: Color) -> Shape:
    low, high = np.full(2, y[0]), np.full(2, y[1])
    return Shape(name, np.array(x), high, color, "area", low, opacity=0.16)
