"""Norm, inner product and orthogonality test: the noise of the mini-batch gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line, network_line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.numbers import short_labels
from gradlens.instruments.panel import (
    Curve,
    Lines,
    LineStyle,
    Ruler,
    Shape,
    Shapes,
    any_finite,
)
from gradlens.instruments.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    RGB,
    Color,
    tint,
)

SHARE = 0.35
"""The picture's share of the width."""
SHORT = {"NormTest": "norm θ", "InnerTest": "inner θ", "OrthoTest": "ortho ν"}
COLORS: dict[str, Color] = {"NormTest": BLUE, "InnerTest": ORANGE, "OrthoTest": GREEN}


# θ² of the norm test is the sum of the other two squares. Its line is wide and those of the others
# are narrow, and that of ν is dashed, so that each can be seen where they are almost equal.
WIDTHS = {"NormTest": 3.6, "InnerTest": 1.5, "OrthoTest": 1.5}
DASHED: LineStyle = (0, (3.0, 1.5))
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
    width = 1.5

    def content(self, history: History) -> Lines:
        found = {name: network_line(history[name]) for name in self.names}
        tests = _shown_tests(self.names, [self.kind(history, name) for name in self.names])
        return Lines(
            tuple(
                Curve(
                    test.label,
                    found[test.name],
                    test.color,
                    test.width if len(tests) > 1 else 1.6,
                    test.style,
                )
                for test in tests
            ),
            scale="log",
            levels=(1.0,),
            beside=_picture(tests, found) if any_finite([*found.values()]) else None,
        )


@dataclass(frozen=True)
class ShownTest:
    """How a test is shown; ``place`` counts the tests of its kind."""

    name: str
    kind: str
    place: int
    label: str

    @property
    def style(self) -> LineStyle:
        """Dots for the second of a kind."""
        if self.place:
            return DOTTED
        return DASHED if self.kind == "OrthoTest" else "-"

    @property
    def width(self) -> float:
        """Points."""
        return WIDTHS.get(self.kind, 1.4) if self.place == 0 else 1.4

    @property
    def color(self) -> RGB:
        """One hue for each kind, and a pale one for the second of its kind."""
        color = COLORS.get(self.kind, MUTED)
        return tint(color, 1.0 if self.place == 0 else 0.5)


def _shown_tests(names: Sequence[str], kinds: Sequence[str]) -> list[ShownTest]:
    labels = short_labels(names, kinds, SHORT)
    return [
        ShownTest(name, kind, kinds[:place].count(kind), label)
        for place, (name, kind, label) in enumerate(zip(names, kinds, labels, strict=True))
    ]


def _picture(tests: Sequence[ShownTest], found: Mapping[str, Line]) -> Shapes:
    known = [test for test in tests if found[test.name].finite.any()]
    values = {test: _last(found[test.name]) for test in known}
    first = {test.kind: values[test] for test in known if test.place == 0}
    reach = max(values.values())
    left, right = min(0.0, 1 - reach), 1 + max(reach, 0.1)
    half = 0.57 * max(right - left, 2 * reach)
    low, high = (left + right) / 2 - half, (left + right) / 2 + half
    shapes = []
    if "OrthoTest" in first:
        ortho = first["OrthoTest"]
        shapes.append(_band("ortho band", (low, high), (-ortho, ortho), GREEN))
    if "InnerTest" in first:
        inner = first["InnerTest"]
        shapes.append(_band("inner band", (1 - inner, 1 + inner), (-half, half), ORANGE))
    for test in known:
        if test.kind == "NormTest":
            name = "norm circle" if test.place == 0 else f"norm circle {test.name}"
            shapes.append(_circle(name, values[test], test))
    zeros = np.zeros(2)
    shapes.append(Shape("mean gradient", np.array([0.0, 1.0]), zeros, INK, "arrow", width=1.2))
    shapes.append(Shape("origin", zeros[:1], zeros[:1], INK, "points", width=3.0))
    step = max(float(one.steps[one.finite][-1]) for one in found.values() if one.finite.any())
    return Shapes(
        tuple(shapes),
        Ruler("dot in circle: noise > gradient", (low, high), ticks=(0.0, 1.0)),
        Ruler("", (-half, half), ticks=()),
        words=f"step {step:,.0f}",
        equal=True,
        share=SHARE,
        title="latest step",
    )


def _last(one: Line) -> float:
    return float(one.values[one.finite][-1])


def _band(name: str, x: tuple[float, float], y: tuple[float, float], color: Color) -> Shape:
    low, high = np.full(2, y[0]), np.full(2, y[1])
    return Shape(name, np.array(x), high, color, "area", low, opacity=0.16)


def _circle(name: str, radius: float, test: ShownTest) -> Shape:
    turns = np.linspace(0, 2 * np.pi, 100)
    x, y = 1 + radius * np.cos(turns), radius * np.sin(turns)
    return Shape(name, x, y, test.color, width=1.5, style=test.style)
