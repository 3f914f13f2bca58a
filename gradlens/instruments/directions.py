"""The directions of largest curvature: whether the gradient along each is signal or noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from gradlens.history.history import History
from gradlens.history.lines import Floats, Line, field_line, reason, rows
from gradlens.history.series import Series
from gradlens.instruments.drawing import label_rows, missing, picture_and_series, row_stride
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Artists, Curve, Drawn, Lines
from gradlens.instruments.scales import StepAxis, fit
from gradlens.instruments.style import (
    BLUE,
    GRID,
    MUTED,
    ORANGE,
    PURPLE,
    TICK_SIZE,
    Entry,
    key,
    signal_colormap,
    size_in_points,
    tint,
)

SHARE, GAP = 0.4, 40.0
"""The picture's share of the width, and points between it and the map."""
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


@dataclass(frozen=True)
class Ratios:
    """Signal-to-noise ratios ``[S, k]`` at S ``steps``, along k directions; NaN for none."""

    steps: Floats
    values: Floats
    reason: str

    @property
    def latest(self) -> Floats:
        """Those of the last step that has any, ``[k]``."""
        known = self.values[np.isfinite(self.values).any(axis=1)]
        found: Floats = known[-1]
        return found


class DirectionsInstrument(Instrument):
    """Signal and noise along the directions of largest curvature, at the latest step and over time.

    The picture shows the latest signal-to-noise ratios of gradient and curvature, those along the
    direction of largest curvature on the left. The map shows those of the gradient over time; of
    several steps in a column, the mean. A gradient of noise alone has a ratio of 1 on average, the
    dashed line, and above 4 in one mini-batch of twenty: what is above is blue, the rest orange. A
    narrow panel has no picture.
    """

    kinds: ClassVar[tuple[str, ...]] = ("DirectionalDerivatives",)
    title: ClassVar[str] = "Signal along directions"
    together: ClassVar[bool] = False
    width: ClassVar[float] = 1.5

    def content(self, history: History) -> Lines | Drawn:
        records = history[self.names[0]]
        gradient, curvature = (ratios(records, n) for n in ("gradient_snr", "curvature_snr"))
        if not np.isfinite(gradient.values).any():
            nothing = np.full_like(gradient.steps, np.nan)
            return Lines((Curve("signal", Line(gradient.steps, nothing, gradient.reason)),))
        latest = gradient.latest
        known = int(np.isfinite(latest).sum())
        return Drawn(
            partial(_draw, gradient=gradient, curvature=curvature),
            (f"signal in {(latest > SIGNAL).sum()} of {known}", False),
        )


class OverlapInstrument(Instrument):
    """Share of the gradient's squared norm that lies along the directions of largest curvature."""

    kinds: ClassVar[tuple[str, ...]] = ("DirectionalDerivatives",)
    title: ClassVar[str] = "Gradient in top directions"
    label: ClassVar[str] = "share of ‖ḡ‖²"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        count = rows([*records.having("eigenvalues").values()]).shape[1]
        return Lines(
            (Curve("overlap", field_line(records, "overlap")),),
            words=f"{count} directions of largest curvature",
            shares=True,
            limits=(0.0, 1.04),
        )


def ratios(records: Series, name: str) -> Ratios:
    """One of the entries ``"gradient_snr"`` and ``"curvature_snr"`` of a series."""
    lists = [*records.column(name).values()]
    why = records.reason or reason(v for one in lists if isinstance(one, list) for v in one)
    return Ratios(records.steps, rows(lists), why)


def _draw(ax: Axes, axis: StepAxis, gradient: Ratios, curvature: Ratios) -> Artists:
    picture, series = picture_and_series(ax, SHARE, GAP)
    shown = key(ax, KEY)
    artists = _map(series, axis, gradient) | ({"key": shown} if shown else {})
    if picture is None:
        return artists
    return artists | _picture(picture, gradient.latest, curvature.latest)


def _picture(ax: Axes, gradient: Floats, curvature: Floats) -> Artists:
    places = np.arange(1.0, gradient.size + 1)
    found = np.concatenate([gradient, curvature])
    fit(ax, [found[found > 0], np.array([0.1, 10.0])], "log")
    low = ax.get_ylim()[0]
    artists: Artists = {
        "noise": ax.axhspan(low, SIGNAL, color=tint(ORANGE, 0.15), linewidth=0, zorder=0.5),
        "one": ax.axhline(1, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1.5),
    }
    shown = np.clip(gradient, low, None)
    artists["stems"] = ax.vlines(
        places, 1, shown, colors=[_colour(value) for value in shown], linewidth=1.4, zorder=2
    )
    (artists["curvature"],) = ax.plot(
        places, curvature, color=PURPLE, linewidth=1.0, marker="o", markersize=2.4, zorder=3
    )
    artists["gradient"] = ax.scatter(
        places, shown, s=16, c=[_colour(value) for value in shown], linewidths=0, zorder=4
    )
    ax.set_xlim(0.4, gradient.size + 0.6)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
    ax.set_ylabel("signal-to-noise ratio", fontsize=TICK_SIZE, color=MUTED, labelpad=1)
    ax.spines["bottom"].set(color=GRID)
    return artists


def _colour(value: float) -> str:
    return BLUE if value > SIGNAL else ORANGE


def _map(ax: Axes, axis: StepAxis, found: Ratios) -> Artists:
    axis.apply(ax)
    count = found.values.shape[1]
    stride = row_stride(count, size_in_points(ax)[1])
    label_rows(ax, [f"λ{n}" for n in range(1, count + 1, stride)], stride, count)
    edges, table = _columns(found, axis)
    mesh = ax.pcolormesh(
        edges,
        np.arange(count + 1),
        np.ma.masked_invalid(np.clip(table.T, *RANGE)),
        norm=LogNorm(*RANGE),
        cmap=signal_colormap(),
        rasterized=True,
        zorder=2,
    )
    undefined = ~np.isfinite(found.values).any(axis=1)
    line = Line(found.steps, np.where(undefined, np.nan, 0.0))
    return {"map": mesh} | missing(ax, axis, [line])


def _columns(found: Ratios, axis: StepAxis) -> tuple[Floats, Floats]:
    """Edges ``[m + 1]`` on the axis, and the means ``[m, k]`` over the steps of each column."""
    places = axis.warp(found.steps)
    span = places[-1] - places[0]
    number = np.arange(places.size)
    if places.size > COLUMNS:
        number = np.minimum((places - places[0]) / span * COLUMNS, COLUMNS - 1).astype(np.int64)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    finite = np.isfinite(found.values)
    sums = np.add.reduceat(np.where(finite, found.values, 0.0), first, axis=0)
    counts = np.add.reduceat(finite.astype(np.float64), first, axis=0)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    last = np.append(first[1:], places.size) - 1
    return axis.unwarp(_edges(places[first], places[last])), means


def _edges(first: Floats, last: Floats) -> Floats:
    inner = (last[:-1] + first[1:]) / 2
    if not inner.size:
        return np.array([first[0] - 0.5, last[-1] + 0.5])
    return np.concatenate(([2 * first[0] - inner[0]], inner, [2 * last[-1] - inner[-1]]))
