"""The loss along one direction, and its figure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.lines import Floats, Line
from gradlens.instruments.drawing import explain_empty, missing
from gradlens.instruments.instrument import Drawing
from gradlens.instruments.panel import Artists
from gradlens.instruments.scales import NumberLabels, StepAxis, fit, log_if_wide, number_label
from gradlens.instruments.style import (
    ALARM,
    BLUE,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    Entry,
    key,
)
from gradlens.landscape.drawing import drawing_of, label_axes

DASHES = (0, (3.0, 1.5))


@dataclass(frozen=True)
class LossLine:
    """The mean loss along a direction: ``losses`` ``[K]`` at ``distances`` ``[K]`` from the origin.

    Losses may be NaN or infinite. ``loss`` is that at the origin, and ``slope`` and ``curvature``
    are its first and second derivative along the direction there, for a distance of one; an
    ``Undefined`` says why there is none. ``axis`` says what the direction and its unit are.
    """

    distances: Floats
    losses: Floats
    axis: str
    loss: float
    slope: float
    curvature: float

    @property
    def parabola(self) -> Floats:
        """loss + slope·a + curvature·a²/2 at the distances a, ``[K]``; NaN where one is missing."""
        a = self.distances
        return self.loss + self.slope * a + self.curvature * a**2 / 2

    def plot(self, ax: Axes | None = None) -> Drawing:
        """Draw the losses, the parabola and the origin on ``ax``, or on a new figure.

        The key has the parabola's slope and curvature. The axis is logarithmic if the largest loss
        is over 30 times the smallest. Red ticks on the base line are at NaNs, grey ones at the top
        at infinite losses.
        """
        return drawing_of(ax, "Loss along a line", self.loss, self._draw)

    def _draw(self, ax: Axes) -> Artists:
        one = Line(self.distances, self.losses)
        low, high = float(self.distances[0]), float(self.distances[-1])
        pad = 0.015 * (high - low)
        ax.set_xlim(low - pad, high + pad)
        ax.xaxis.set_major_formatter(NumberLabels())
        label_axes(ax, self.axis, "mean loss")
        if not one.finite.any():
            return explain_empty(ax, [one])
        fit(ax, [self.losses], log_if_wide([self.losses]))
        (front,) = ax.plot(self.distances, self.losses, color=BLUE, linewidth=1.6, zorder=4)
        artists: Artists = {"losses": front}
        entries = [Entry("loss", BLUE)]
        if np.isfinite(self.parabola).any():
            (dashed,) = ax.plot(
                self.distances,
                self.parabola,
                color=ORANGE,
                linewidth=1.2,
                linestyle=DASHES,
                zorder=3,
            )
            artists["parabola"] = dashed
            entries.append(Entry(self._derivatives(), ORANGE, "dashed"))
        (point,) = ax.plot(
            [0], [self.loss], "o", color=INK, markersize=5, markeredgecolor=PAPER, zorder=5
        )
        artists |= {"origin": point} | missing(ax, StepAxis(low, high), [one])
        marks = {"NaN": (self.losses != self.losses, ALARM), "∞": (np.isinf(self.losses), MUTED)}
        entries += [Entry(name, color, "thin") for name, (at, color) in marks.items() if at.any()]
        explained = key(ax, entries)
        return artists | ({"key": explained} if explained else {})

    def _derivatives(self) -> str:
        slope, curvature = number_label(self.slope, 2), number_label(self.curvature, 2)
        return f"slope {slope}, curvature {curvature}"
