"""The local step size: the point of a fitted parabola at which each step ended."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Floats, line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Artists, Curve, Lines, Picture
from gradlens.instruments.scales import NumberLabels
from gradlens.instruments.style import BLUE, GRID, INK, ORANGE, Color, Entry, tint

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

    kinds: ClassVar[tuple[str, ...]] = ("Alpha",)
    title: ClassVar[str] = "Local step size α"
    together: ClassVar[bool] = False
    width: ClassVar[float] = 1.5

    def content(self, history: History) -> Lines:
        found = line(history[self.names[0]])
        picture = Picture(0.42, lambda ax: _picture(ax, found.values[found.finite]), KEY)
        return Lines(
            (Curve("α", found),),
            spiky=True,
            room=(-1.0, 1.0),
            levels=(-1.0, 0.0, 1.0),
            picture=picture,
        )


def _picture(ax: Axes, values: Floats) -> Artists:
    low, high = _range(values)
    places = np.linspace(low, high, 100)
    (parabola,) = ax.plot(places, places**2, color=INK, linewidth=1.2, zorder=3)
    top = 1.08 * max(low**2, high**2)
    artists: Artists = {"parabola": parabola}
    recent = values[-max(1, round(RECENT * values.size)) :]
    edges = np.linspace(low, high, 25)
    artists["all"] = _density(ax, values, edges, 0.55 * top, BLUE, True)
    artists["recent"] = _density(ax, recent, edges, 0.55 * top, ORANGE, False)
    artists["mean"] = _mean(ax, values, BLUE)
    artists["recent mean"] = _mean(ax, recent, ORANGE)
    ax.set_xlim(low, high)
    ax.set_ylim(0, top)
    ax.set_xticks([-1, 0, 1])
    ax.xaxis.set_major_formatter(NumberLabels())
    ax.set_yticks([])
    ax.spines["bottom"].set(color=GRID)
    return artists


def _range(values: Floats) -> tuple[float, float]:
    low, high = np.quantile(values, (0.01, 0.99))
    return float(np.clip(low, -REACH, -1.35)), float(np.clip(high, 1.35, REACH))


def _density(
    ax: Axes, values: Floats, edges: Floats, height: float, color: Color, fill: bool
) -> Artist:
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    heights = height * counts / counts.max()
    if fill:
        return ax.stairs(heights, edges, fill=True, color=tint(color, 0.4), zorder=1.5)
    return ax.stairs(heights, edges, color=color, linewidth=1.0, zorder=2)


def _mean(ax: Axes, values: Floats, color: Color) -> Artist:
    mean = float(np.clip(values.mean(), *ax.get_xlim()))
    (dot,) = ax.plot([mean], [mean**2], "o", color=color, markersize=4.5, zorder=5)
    return dot
