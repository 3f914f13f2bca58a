"""The directions of largest curvature: whether the gradient along each is signal or noise."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LogNorm

from gradlens.history.history import History
from gradlens.history.lines import Floats, Line, field_line, reason, rows
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import LayerTable
from gradlens.instruments.panel import Curve, Lines, Map, Shape, Shapes
from gradlens.instruments.scales import Ruler, padded
from gradlens.instruments.style import BLUE, MUTED, ORANGE, PURPLE, Entry, tint

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
    title = "Signal along directions"

    def content(self, history: History) -> Lines | Map:
        records = history[self.names[0]]
        gradient, why = _ratios(records, "gradient_snr")
        latest = _last(gradient)
        if not np.isfinite(latest).any():
            nothing = np.full(len(records), np.nan)
            return Lines((Curve("signal", Line(records.steps, nothing, why)),))
        curvature, _ = _ratios(records, "curvature_snr")
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
            shares=True,
            limits=(0.0, 1.04),
        )


def _ratios(records: Series, name: str) -> tuple[Floats, str]:
    """Ratios ``[S, k]`` at S steps along k directions, NaN for none, and why there is none."""
    lists = [*records.column(name).values()]
    why = records.reason or reason(v for one in lists if isinstance(one, list) for v in one)
    return rows(lists), why


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
