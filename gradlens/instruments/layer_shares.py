"""Each layer's share of the sum over all layers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Floats
from gradlens.instruments.drawing import SMOOTH_FROM, Artists, any_finite, explain_empty, missing
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layer_lines import SIZES, LayerLines, layer_lines
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.series import trend
from gradlens.instruments.style import PAPER, message, sequence_colors, sequence_key, title

SEPARATED = 20
"""Largest number of layers that are separated by lines."""


class LayerSharesInstrument(Instrument):
    """Each layer's share of the sum of norms, stacked from input (bottom) to output (top)."""

    kinds: ClassVar[tuple[str, ...]] = (
        "OutputNorm",
        "InputNorm",
        "OutputGradientGeometry",
        "InputGradientGeometry",
        "GradientGeometry",
        "UpdateGeometry",
        "ParameterNorm",
    )
    together: ClassVar[bool] = False
    secondary: ClassVar[bool] = True

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        found = layer_lines(history[self.names[0]], history, SIZES)
        title(ax, f"{self.heading(history)}: shares")
        axis.apply(ax)
        every = list(found.lines.values())
        if not any_finite(every):
            return explain_empty(ax, every)
        if len(every) == 1:
            words = f"{next(iter(found.lines))} has all of it: no other layer has a number"
            return {"message": message(ax, words)}
        steps, shares = _shares(found, axis)
        width = 0.3 if len(shares) <= SEPARATED else 0.0
        areas = ax.stackplot(
            steps, shares, colors=sequence_colors(len(shares)), edgecolor=PAPER, linewidth=width
        )
        ax.set_ylim(0, 1)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        ax.grid(visible=False)
        artists: Artists = dict(zip(found.lines, areas, strict=True))
        shown = sequence_key(ax, list(found.lines))
        artists |= {"key": shown} if shown else {}
        return artists | missing(ax, axis, every)


def _shares(found: LayerLines, axis: StepAxis) -> tuple[Floats, Floats]:
    """Steps ``[K]`` and shares ``[R, K]``, which are 0 for layers without a number."""
    lines = list(found.lines.values())
    if len(lines[0].steps) >= SMOOTH_FROM:
        lines = [trend(one, axis.warp, bridge=True) for one in lines]
    sizes = np.array([np.where(np.isfinite(one.values), one.values, 0.0) for one in lines])
    total = sizes.sum(axis=0)
    shares: Floats = np.divide(sizes, total, out=np.zeros_like(sizes), where=total > 0)
    return lines[0].steps, shares
