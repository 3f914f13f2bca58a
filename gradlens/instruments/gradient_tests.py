"""Norm, inner product and orthogonality test: the noise of the mini-batch gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from gradlens.history.history import History
from gradlens.history.lines import Line, network_line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.numbers import short_labels
from gradlens.instruments.panel import Artists, Curve, Lines, LineStyle, Picture
from gradlens.instruments.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    RGB,
    SMALLEST_SIZE,
    Color,
    tint,
)

SHARE = 0.35
"""The picture's share of the width."""
SHORT = {"NormTest": "norm θ", "InnerTest": "inner θ", "OrthoTest": "ortho ν"}
COLORS: dict[str, Color] = {"NormTest": BLUE, "InnerTest": ORANGE, "OrthoTest": GREEN}


@dataclass(frozen=True)
class Noise:
    """Spread of the mean gradient in units of its length; NaN where there is no test."""

    norm: float
    inner: float
    ortho: float


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

    kinds: ClassVar[tuple[str, ...]] = ("NormTest", "InnerTest", "OrthoTest")
    title: ClassVar[str] = "Gradient tests"
    label: ClassVar[str] = "θ, ν"
    width: ClassVar[float] = 1.5

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
            picture=Picture(SHARE, lambda ax: _picture(ax, tests, found)),
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


def _picture(ax: Axes, tests: Sequence[ShownTest], found: Mapping[str, Line]) -> Artists:
    known = [test for test in tests if found[test.name].finite.any()]
    values = {test: _last(found[test.name]) for test in known}
    first = {test.kind: values[test] for test in known if test.place == 0}
    noise = Noise(*(first.get(kind, math.nan) for kind in SHORT))
    _frame(ax, max(values.values()))
    step = max(float(one.steps[one.finite][-1]) for one in found.values() if one.finite.any())
    artists: Artists = {"step": _corner(ax, f"step {step:,.0f}")} | _bands(ax, noise)
    for test in known:
        if test.kind == "NormTest":
            name = "norm circle" if test.place == 0 else f"norm circle {test.name}"
            artists[name] = _circle(ax, values[test], test)
    return artists | _arrow(ax)


def _last(one: Line) -> float:
    return float(one.values[one.finite][-1])


def _frame(ax: Axes, reach: float) -> None:
    left, right = min(0.0, 1 - reach), 1 + max(reach, 0.1)
    half = 0.57 * max(right - left, 2 * reach)
    middle = (left + right) / 2
    ax.set_xlim(middle - half, middle + half)
    ax.set_ylim(-half, half)
    ax.set_aspect("equal", adjustable="box", anchor="NW")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set(visible=True, color=GRID, linewidth=0.8)


def _corner(ax: Axes, text: str) -> Artist:
    # The circle does not reach this corner.
    return ax.annotate(
        text,
        (0, 0),
        xycoords="axes fraction",
        xytext=(3, 3),
        textcoords="offset points",
        fontsize=SMALLEST_SIZE,
        color=MUTED,
    )


def _bands(ax: Axes, noise: Noise) -> Artists:
    low, high = ax.get_xlim()
    artists: Artists = {}
    if math.isfinite(noise.ortho):
        corner = (low, -noise.ortho)
        flat = Rectangle(corner, high - low, 2 * noise.ortho, facecolor=GREEN, alpha=0.16, lw=0)
        artists["ortho band"] = ax.add_patch(flat)
    if math.isfinite(noise.inner):
        corner = (1 - noise.inner, low)
        upright = Rectangle(corner, 2 * noise.inner, 2 * (high - low), fc=ORANGE, alpha=0.16, lw=0)
        upright.set_y(ax.get_ylim()[0])
        artists["inner band"] = ax.add_patch(upright)
    return artists


def _circle(ax: Axes, radius: float, test: ShownTest) -> Artist:
    look: dict[str, Any] = {"edgecolor": test.color, "linewidth": 1.5, "linestyle": test.style}
    circle = Circle((1, 0), radius, fill=False, zorder=4, **look)
    return ax.add_patch(circle)


def _arrow(ax: Axes) -> Artists:
    low, high = ax.get_xlim()
    head = max(3.0, 8 - 0.8 * (high - low))
    arrow = FancyArrowPatch(
        (0, 0), (1, 0), arrowstyle="-|>", mutation_scale=head, shrinkA=0, shrinkB=0, color=INK,
        linewidth=1.2, zorder=5,
    )  # fmt: skip
    (origin,) = ax.plot([0], [0], "o", color=INK, markersize=3, zorder=5)
    return {"mean gradient": ax.add_patch(arrow), "origin": origin}
