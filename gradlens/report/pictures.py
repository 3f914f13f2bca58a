"""Cards that are no lines: maps of layers, histograms, densities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gradlens.history.histograms import Histogram, ends, histogram
from gradlens.history.history import History
from gradlens.history.lines import Floats
from gradlens.history.series import Series
from gradlens.instruments import (
    Histogram1dInstrument,
    Histogram2dInstrument,
    Instrument,
    SpectralDensityInstrument,
)
from gradlens.instruments.scales import step_label
from gradlens.instruments.spectral_density import FLOOR, densities
from gradlens.instruments.style import BLUE, MUTED
from gradlens.report.cards import Card, PictureCard, ShapesCard
from gradlens.report.hints import HINTS

COLUMNS, ROWS = 600, 60
"""Largest number of columns and rows of the histograms of a run."""

REACH = 0.9
"""Share of the histograms of a run whose range is shown as a whole."""


# Histograms ---------------------------------------------------------------------------------


def _elements(history: History, instrument: Instrument) -> list[Card]:
    """Histograms of gradient elements over the steps."""
    records = history[instrument.names[0]]
    title, group = instrument.heading(history), instrument.group(history)
    found = _evenly([one for one in _histograms(records) if one.counts.any()])
    low, high = _range(found)
    edges = np.linspace(low, high, ROWS + 1)
    densities = np.array([_rebinned(one, edges) for one in found]).T
    steps = np.array([one.step for one in found], dtype=np.float64)
    words = "density of elements of gₙ, log"
    return [
        PictureCard(
            title, group, words, _shades(densities), (low, high), "element of gₙ", steps=steps,
            hint=HINTS["GradHist1d"],
        )
    ]  # fmt: skip


def _histograms(records: Series) -> list[Histogram]:
    values = records.items()
    return [histogram(step, value) for step, value in values if isinstance(value, Mapping)]


def _evenly(found: Sequence[Histogram]) -> list[Histogram]:
    if len(found) <= COLUMNS:
        return [*found]
    return [found[round(place)] for place in np.linspace(0, len(found) - 1, COLUMNS)]


def _range(found: Sequence[Histogram]) -> tuple[float, float]:
    """The range of the bins that aren't empty, of all but a few histograms."""
    low, high = np.array([one.occupied(0) for one in found]).T
    return float(np.quantile(low, 1 - REACH)), float(np.quantile(high, REACH))


def _rebinned(one: Histogram, edges: Floats) -> Floats:
    """Mean density of a histogram in other bins."""
    cumulative = np.concatenate(([0.0], np.cumsum(one.counts))) / one.counts.sum()
    shares = np.diff(np.interp(edges, one.edges[0], cumulative))
    found: Floats = shares / np.diff(edges)
    return found


def _shades(sizes: Floats) -> Floats:
    """Sizes by their logarithm between 0 for nothing and 1 for the largest."""
    positive = sizes[sizes > 0]
    low, high = np.log(positive.min()), np.log(positive.max())
    logarithms = np.log(np.where(sizes > 0, sizes, positive.min()))
    span = max(high - low, np.log(2.0))
    shades: Floats = np.where(sizes > 0, 0.08 + 0.92 * (logarithms - low) / span, 0.0)
    return shades


def _joint(history: History, instrument: Instrument) -> list[Card]:
    """The latest histogram of gradient elements against parameters."""
    records = history[instrument.names[0]]
    title, group = instrument.heading(history), instrument.group(history)
    found = ends(records)
    last = found[-1]
    words = f"step {last.step:,} · count, log"
    return [
        PictureCard(
            title, group, words, _shades(_equal(last)), last.occupied(1), "parameter",
            last.occupied(0), "element of gₙ", hint=HINTS["GradHist2d"],
        )
    ]  # fmt: skip


def _equal(one: Histogram) -> Floats:
    """Counts ``[rows, columns]`` in the bins that aren't empty, which are equally wide."""
    across, up = (np.flatnonzero(one.marginal(axis)) for axis in (0, 1))
    return one.counts[across[0] : across[-1] + 1, up[0] : up[-1] + 1].T


# Densities ----------------------------------------------------------------------------------


def _spectrum(history: History, instrument: Instrument) -> list[Card]:
    """The density of eigenvalues at the first and the latest step."""
    records = history[instrument.names[0]]
    title, group = instrument.heading(history), instrument.group(history)
    found = densities(records)
    floor = FLOOR * float(found[-1][1]["density"].max())
    shapes = []
    for (step, one), color in zip(reversed(found), (BLUE, MUTED), strict=False):
        shown = np.where(one["density"] > floor, one["density"], np.nan)
        shapes.append((f"step {step_label(step)}", one["grid"], shown, color))
    words = "density of all eigenvalues"
    return [ShapesCard(title, group, words, "eigenvalue", tuple(shapes), HINTS["SpectralDensity"])]


PICTURES: Mapping[type[Instrument], Callable[[History, Instrument], list[Card]]] = {
    Histogram1dInstrument: _elements,
    Histogram2dInstrument: _joint,
    SpectralDensityInstrument: _spectrum,
}
"""Instruments whose series aren't numbers per step."""
