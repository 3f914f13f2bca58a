"""Histogram of the elements of all per-sample gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gradlens.history.histograms import Histogram, ends, percent
from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Artists, Curve, Drawn, Lines
from gradlens.instruments.scales import NumberLabels, StepAxis, fit
from gradlens.instruments.style import (
    BLUE,
    MUTED,
    ORANGE,
    TICK_SIZE,
    Color,
    Entry,
    key,
    tint,
)


class Histogram1dInstrument(Instrument):
    """Density of gradient elements at the latest step, in front of the first one's.

    It shows densities, because ranges may differ from step to step. Outer bins with clipped
    elements are marked.
    """

    kinds: ClassVar[tuple[str, ...]] = ("GradHist1d",)
    title: ClassVar[str] = "Gradient elements"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines | Drawn:
        records = history[self.names[0]]
        found = ends(records)
        if not found:
            return Lines((Curve("elements", line(records)),))
        last = found[-1]
        return Drawn(partial(_draw, found=found), (last.excess(clipped=False), last.nan > 0))


def _draw(ax: Axes, axis: StepAxis, found: Sequence[Histogram]) -> Artists:
    first, last = found[0], found[-1]
    artists = fill(ax, last)
    entries = [Entry(f"step {last.step:,}", BLUE, "box")]
    if len(found) > 1:
        artists["first"] = outline(ax, first)
        entries.append(Entry(f"step {first.step:,}", MUTED, "thin"))
    if last.clipped:
        entries.append(Entry(f"{percent(last.clipped)} clipped", ORANGE, "box"))
    shown = key(ax, entries)
    show_elements(ax, [first, last])
    label_elements(ax)
    return artists | ({"key": shown} if shown else {})


def fill(ax: Axes, one: Histogram) -> Artists:
    """Draw a histogram as an area, with bins of clipped elements in another colour."""
    edges, density = one.edges[0], one.density
    area = ax.stairs(density, edges, fill=True, color=tint(BLUE, 0.4), zorder=2)
    artists: Artists = {"latest": area, "latest outline": outline(ax, one, BLUE)}
    for name, count, place in (("below", one.below[0], 0), ("above", one.above[0], -1)):
        if count:
            ends = edges[[place, place + 1]] if place == 0 else edges[-2:]
            artists[name] = ax.stairs(density[[place]], ends, fill=True, color=ORANGE, zorder=4)
    return artists


def outline(ax: Axes, one: Histogram, color: Color = MUTED) -> Artist:
    """Draw a histogram as a line."""
    # The line ends at the outer edges, because zero isn't on a logarithmic axis.
    return ax.stairs(one.density, one.edges[0], baseline=None, color=color, linewidth=0.8, zorder=3)


def show_elements(ax: Axes, shown: Sequence[Histogram]) -> None:
    """Fit both axes to the bins that aren't empty, on a logarithmic density axis."""
    ranges = np.array([one.occupied(0) for one in shown if one.counts.any()])
    low, high = ranges[:, 0].min(), ranges[:, 1].max()
    ax.set_xlim(low - 0.02 * (high - low), high + 0.02 * (high - low))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(NumberLabels())
    filled = np.concatenate([one.density[one.density > 0] for one in shown])
    # At least a decade, so that small differences between bins aren't magnified.
    fit(ax, [filled, np.array([0.1 * filled.max()])], "log")


def label_elements(ax: Axes) -> None:
    """Label the axes."""
    ax.set_ylabel("density", fontsize=TICK_SIZE, color=MUTED, labelpad=1)
    ax.set_xlabel("element of gₙ", loc="right", fontsize=TICK_SIZE, color=MUTED, labelpad=1)
