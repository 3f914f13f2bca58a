"""Instruments with a picture beside what they show over time: of steps, tests and directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.colors import LogNorm

from gradlens.history.history import History
from gradlens.history.lines import Floats, field_line, line, network_line, reason, rows
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.numbers import short_labels
from gradlens.instruments.panel import Curve, Lines, LineStyle, Map, Shape, Shapes
from gradlens.instruments.scales import Ruler, padded
from gradlens.instruments.series import LayerTable
from gradlens.instruments.style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, Color, Entry, tint

# Steps --------------------------------------------------------------------------------------

KEY_OF_ALPHA = (Entry("all", tint(BLUE, 0.4), "box"), Entry("latest 10 %", ORANGE))
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
    places, edges = np.linspace(low, high, 100), np.linspace(low, high, 25)
    top = 1.08 * max(low**2, high**2)
    recent = values[-max(1, round(RECENT * values.size)) :]
    outlines, means = [], []
    for name, chosen, color, dot in (
        ("all", values, tint(BLUE, 0.4), BLUE), ("recent", recent, ORANGE, ORANGE)
    ):  # fmt: skip
        counts, _ = np.histogram(np.clip(chosen, low, high), edges)
        heights = np.repeat(0.55 * top * counts / counts.max(), 2)
        outlines.append(Shape(name, np.repeat(edges, 2)[1:-1], heights, color, "area"))
        mean = np.clip([chosen.mean()], low, high)
        called = "mean" if name == "all" else "recent mean"
        means.append(Shape(called, mean, mean**2, dot, "points", width=4.5))
    parabola = Shape("parabola", places, places**2, INK, width=1.2)
    return Shapes(
        (outlines[0], replace(outlines[1], kind="line"), parabola, *means),
        Ruler("", (low, high), ticks=(-1.0, 0.0, 1.0)),
        Ruler("", (0.0, top), ticks=()),
        KEY_OF_ALPHA,
        share=0.42,
        title="parabola",
    )


def range_of_alpha(values: Floats) -> tuple[float, float]:
    """The range in which almost all step sizes are; it has room for those from −1 to 1."""
    low, high = np.quantile(values, (0.01, 0.99)) if values.size else (-1.0, 1.0)
    return float(np.clip(low, -REACH, -1.35)), float(np.clip(high, 1.35, REACH))


# Gradient tests -----------------------------------------------------------------------------

TESTS_SHARE = 0.35
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
        curves = []
        for place, (label, name, kind) in enumerate(zip(labels, self.names, kinds, strict=True)):
            color, width, style = LOOKS[kind]
            if kind in kinds[:place]:  # the second of its kind is pale
                color, width, style = tint(color, 0.5), 1.4, DOTTED
            elif len(kinds) == 1:
                width = 1.6
            curves.append(Curve(label, network_line(history[name]), color, width, style))
        known = [(k, c) for k, c in zip(kinds, curves, strict=True) if c.line.finite.any()]
        beside = _tests(known) if known else None
        return Lines(tuple(curves), levels=(1.0,), beside=beside)


def _tests(tests: Sequence[tuple[str, Curve]]) -> Shapes:
    """The tests of each kind at their latest steps; all have numbers."""
    values = [float(one.line.values[one.line.finite][-1]) for _, one in tests]
    step = max(float(one.line.steps[one.line.finite][-1]) for _, one in tests)
    kinds = [kind for kind, _ in tests]
    first = {kind: values[kinds.index(kind)] for kind in kinds}
    reach = max(values)
    left, right = min(0.0, 1 - reach), 1 + max(reach, 0.1)
    half = 0.57 * max(right - left, 2 * reach)
    low, high = (left + right) / 2 - half, (left + right) / 2 + half
    turns, zeros, ones = np.linspace(0, 2 * np.pi, 100), np.zeros(2), np.ones(2)
    bands: list[Shape] = []
    circles: list[Shape] = []
    for kind, name, color in (("OrthoTest", "ortho", GREEN), ("InnerTest", "inner", ORANGE)):
        if kind in first:
            width, is_across = first[kind], kind == "OrthoTest"
            x = np.array([low, high] if is_across else [1 - width, 1 + width])
            end = (width if is_across else half) * ones
            bands.append(Shape(f"{name} band", x, end, color, "area", -end, opacity=0.16))
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
        share=TESTS_SHARE,
        title="latest step",
    )


# Directions of large curvature --------------------------------------------------------------

SHARE = 0.4
"""The picture's share of the width."""
COLUMNS = 40
"""Largest number of columns of the map; of several steps in one, the mean is shown.

Fewer than a screen could show, since ratios of single mini-batches scatter widely.
"""
SIGNAL = 4.0
"""A ratio that noise alone exceeds in one mini-batch of twenty."""
RANGE = (SIGNAL / 16, SIGNAL * 16)
"""Ratios with the outermost colours."""
KEY = (
    Entry("signal", BLUE),
    Entry("noise", ORANGE),
    Entry("of curvature", PURPLE),
    Entry("95 % of noise", tint(ORANGE, 0.15), "box"),
)


class DirectionsInstrument(Instrument):
    """Signal and noise along the directions of largest curvature, at the latest step and over time.

    The picture shows the latest signal-to-noise ratios of gradient and curvature, those along the
    direction of largest curvature on the left. The map shows those of the gradient over time; of
    several steps in a column, the mean. A gradient of noise alone has a ratio of 1 on average, the
    dashed line, and above 4 in one mini-batch of twenty: what is above is blue, the rest orange. A
    narrow panel has no picture.
    """

    kinds = ("DirectionalDerivatives",)

    def content(self, history: History) -> Lines | Map:
        records = history[self.names[0]]
        gradient, curvature = (
            rows([*records.column(name).values()]) for name in ("gradient_snr", "curvature_snr")
        )
        lists = (one for one in records.column("gradient_snr").values() if isinstance(one, list))
        why = records.reason or reason(value for one in lists for value in one)
        latest = _last(gradient)
        if not np.isfinite(latest).any():
            return Lines((Curve("signal", replace(line(records), reason=why)),))
        table = _columns(records.steps, gradient, why)
        count = f"{(latest > SIGNAL).sum()} of {np.isfinite(latest).sum()}"
        return Map(
            table,
            table.names,
            LogNorm(*RANGE),
            words="signal-to-noise ratio of the gradient",
            readout=(f"signal in {count}", False),
            beside=_latest(latest, _last(curvature)),
            colors="signal",
        )


class OverlapInstrument(Instrument):
    """Share of the gradient's squared norm that lies along the directions of largest curvature."""

    kinds = ("DirectionalDerivatives",)
    title = "Gradient in top directions"
    label = "share of ‖ḡ‖²"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        count = rows([*records.having("eigenvalues").values()]).shape[1]
        return Lines(
            (Curve("overlap", field_line(records, "overlap")),),
            words=f"{count} directions of largest curvature",
            scale="linear",
            shares=True,
            limits=(0.0, 1.04),
        )


def _last(ratios: Floats) -> Floats:
    """Those of the last step that has any, ``[k]``; NaN if there is none."""
    known = ratios[np.isfinite(ratios).any(axis=1)]
    return known[-1] if len(known) else np.full(ratios.shape[1], np.nan)


def _latest(gradient: Floats, curvature: Floats) -> Shapes:
    places = np.arange(1.0, gradient.size + 1)
    found = np.concatenate([gradient, curvature])
    found = found[np.isfinite(found) & (found > 0)]
    low, high = padded(min(found.min(), 0.1), max(found.max(), 10.0), log=True)
    ends, shown = np.array([0.4, gradient.size + 0.6]), np.clip(gradient, low, None)
    noise = np.full(2, SIGNAL)
    shapes = [Shape("noise", ends, noise, tint(ORANGE, 0.15), "area", np.full(2, low))]
    shapes.append(Shape("one", ends, np.ones(2), MUTED, width=0.8, style=(0, (4, 3))))
    for name, color, chosen in (
        ("signal", BLUE, shown > SIGNAL), ("within noise", ORANGE, shown <= SIGNAL)
    ):  # fmt: skip
        x, y = places[chosen], shown[chosen]
        # A stem for each, with a gap behind it.
        stems = np.stack([np.ones_like(y), y, np.full_like(y, np.nan)], 1).ravel()
        shapes.append(Shape(f"{name} stems", np.repeat(x, 3), stems, color, width=1.4))
        shapes.append(Shape(name, x, y, color, "points", width=4.0))
    shapes.append(Shape("curvature", places, curvature, PURPLE))
    shapes.append(Shape("curvature points", places, curvature, PURPLE, "points", width=2.4))
    return Shapes(
        tuple(shapes),
        Ruler("", (ends[0], ends[1]), ticks=tuple(places[:: max(1, gradient.size // 5)])),
        Ruler("signal-to-noise ratio", (low, high), log=True),
        KEY,
        share=SHARE,
        title="latest step",
    )


def _columns(steps: Floats, ratios: Floats, why: str) -> LayerTable:
    """The ratios at their steps, or their means over equal numbers of steps."""
    pieces = np.array_split(np.arange(steps.size), min(COLUMNS, steps.size))
    finite = np.isfinite(ratios)
    sums = np.array([np.where(finite, ratios, 0.0)[piece].sum(0) for piece in pieces])
    counts = np.array([finite[piece].sum(0) for piece in pieces])
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).T
    middles = np.array([(steps[piece[0]] + steps[piece[-1]]) / 2 for piece in pieces])
    # Directions that don't exist are blank, and steps without any direction are marked.
    recorded = np.broadcast_to(~np.isfinite(means).any(axis=0), means.shape)
    names = tuple(f"λ{n}" for n in range(1, len(means) + 1))
    return LayerTable(names, middles, means, recorded, why)
