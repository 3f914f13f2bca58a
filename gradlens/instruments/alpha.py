"""The local step size: the point of a fitted parabola at which each step ended."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Floats, Line, line
from gradlens.instruments.drawing import (
    Artists,
    any_finite,
    beyond,
    curve,
    explain_empty,
    missing,
    picture_and_series,
    readout,
)
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import NumberLabels, StepAxis, fit, without_spikes
from gradlens.instruments.style import (
    BLUE,
    GRID,
    INK,
    MUTED,
    ORANGE,
    Color,
    Entry,
    key,
    tint,
    title,
)

SHARE, GAP = 0.42, 34.0
"""The picture's share of the width, and points between it and the line."""
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

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        found = line(history[self.names[0]])
        if not any_finite([found]):
            axis.apply(ax)
            return explain_empty(ax, [found])
        title(ax, self.heading(history), *readout(found))
        picture, series = picture_and_series(ax, SHARE, GAP)
        artists = _series(series, axis, found)
        if picture is None:
            return artists
        entries = [Entry("all", tint(BLUE, 0.4), "box"), Entry("latest 10 %", ORANGE)]
        shown = key(ax, entries)
        artists |= {"key": shown} if shown else {}
        return artists | _picture(picture, found.values[found.finite])


def _series(ax: Axes, axis: StepAxis, found: Line) -> Artists:
    axis.apply(ax)
    artists = curve(ax, axis, found, BLUE, "alpha")
    fit(ax, [without_spikes(found.values), np.array([-1.0, 1.0])], "linear")
    for level in (-1, 0, 1):
        marked = ax.axhline(level, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)
        artists[f"level {level}"] = marked
    return artists | missing(ax, axis, [found]) | beyond(ax, axis, [found])


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
