"""Histogram of gradient elements against the parameters that they belong to."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator, NullLocator

from gradlens.history.histograms import Histogram, ends
from gradlens.history.history import History
from gradlens.history.lines import Floats, line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Artists, Curve, Drawn, Lines
from gradlens.instruments.scales import NumberLabels, StepAxis, number_label
from gradlens.instruments.style import (
    BLUE,
    GRID,
    MUTED,
    TICK_SIZE,
    density_colormap,
    inside,
    subtitle,
    tint,
)


class Histogram2dInstrument(Instrument):
    """Gradient elements (across) and parameter values (up) at the latest step.

    The colour is the logarithm of the count; the marginals have logarithmic counts too.
    """

    kinds: ClassVar[tuple[str, ...]] = ("GradHist2d",)
    title: ClassVar[str] = "Joint histogram"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines | Drawn:
        records = history[self.names[0]]
        found = ends(records)
        if not found:
            return Lines((Curve("elements", line(records)),))
        return Drawn(partial(_draw, last=found[-1]), (found[-1].excess(), found[-1].nan > 0))


def _draw(ax: Axes, axis: StepAxis, last: Histogram) -> Artists:
    joint = inside(ax, 0, 0, 0.83, 0.8)
    across = inside(ax, 0, 0.83, 0.83, 0.17)
    up = inside(ax, 0.855, 0, 0.145, 0.8)
    most = number_label(float(last.counts.max()))
    words = subtitle(ax, f"step {last.step:,} · colour: count, 1 to {most}, log")
    return {**_joint(joint, last), **_marginals(across, up, last), "subtitle": words}


def draw_joint(ax: Axes, one: Histogram) -> Artist:
    """Draw the counts of a two-dimensional histogram as colours, on a logarithmic scale."""
    counts = np.ma.masked_equal(one.counts.T, 0)
    norm = LogNorm(1, max(float(one.counts.max()), 2))
    return ax.pcolormesh(
        one.edges[0], one.edges[1], counts, norm=norm, cmap=density_colormap(), rasterized=True,
        zorder=2,
    )  # fmt: skip


def _joint(ax: Axes, one: Histogram) -> Artists:
    mesh = draw_joint(ax, one)
    ax.set_xlim(_range(one, 0))
    ax.set_ylim(_range(one, 1))
    for axis, most in ((ax.xaxis, 4), (ax.yaxis, 3)):
        axis.set_major_locator(MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(NumberLabels())
    ax.set_xlabel("element of gₙ", loc="right", fontsize=TICK_SIZE, color=MUTED, labelpad=1)
    ax.set_ylabel("parameter", fontsize=TICK_SIZE, color=MUTED, labelpad=1)
    return {"joint": mesh}


def _marginals(across: Axes, up: Axes, one: Histogram) -> Artists:
    style: dict[str, Any] = {
        "fill": True,
        "facecolor": tint(BLUE, 0.4),
        "edgecolor": BLUE,
        "linewidth": 0.6,
    }
    first, second = _height(one.marginal(0)), _height(one.marginal(1))
    artists: Artists = {
        "marginal x": across.stairs(first, one.edges[0], **style),
        "marginal y": up.stairs(second, one.edges[1], orientation="horizontal", **style),
    }
    across.set_xlim(_range(one, 0))
    across.set_ylim(0, 1.05 * first.max())
    up.set_ylim(_range(one, 1))
    up.set_xlim(0, 1.05 * second.max())
    for ax in (across, up):
        _bare(ax)
    up.spines["bottom"].set_visible(False)
    up.spines["left"].set(visible=True, color=GRID)
    return artists


def _height(counts: Floats) -> Floats:
    # The logarithm starts at half an element, so that a single one is visible.
    return np.asarray(np.log10(2 * np.maximum(counts, 0.5)), dtype=np.float64)


def _range(one: Histogram, axis: int) -> tuple[float, float]:
    low, high = one.occupied(axis)
    pad = 0.02 * (high - low)
    return low - pad, high + pad


def _bare(ax: Axes) -> None:
    ax.grid(visible=False)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(NullLocator())
        axis.set_minor_locator(NullLocator())
