"""Which layers are noisy: layers or parameters of a run, ranked by the noise of their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Floats, Line
from gradlens.history.records import Source
from gradlens.instruments.layers import Layout, layout, row_lines

LARGE_IS_NOISY: Mapping[str, bool] = {
    "NormTest": True,
    "InnerTest": True,
    "OrthoTest": True,
    "GradNoiseScale": True,
    "MeanGSNR": False,
}
"""Kinds of quantities that measure noise, and whether a larger value means more of it."""


@dataclass(frozen=True)
class RankedLayer:
    """A layer or parameter with its latest value, and the median of all that are numbers.

    ``reason`` says why the latest value that isn't a number has none. Both values are NaN if there
    is no number at all.
    """

    name: str
    last: float
    median: float
    reason: str = ""


@dataclass(frozen=True)
class NoiseRanking:
    """The layers or parameters (``noun``) of a series, by their medians, the noisiest first.

    Those without a number are at the end. ``label`` says what the numbers are.
    """

    series: str
    noun: str
    label: str
    large_is_noisy: bool
    layers: tuple[RankedLayer, ...]


def noise_rankings(history: History) -> tuple[NoiseRanking, ...]:
    """A ranking for each series that has the noise of layers or parameters."""
    found = (_ranking(name, source, history) for name, source in history.sources.items())
    return tuple(ranking for ranking in found if ranking is not None)


def _ranking(series: str, source: Source, history: History) -> NoiseRanking | None:
    kind = next((kind for kind in source.kinds if kind in LARGE_IS_NOISY), "")
    found = layout(history[series], history) if kind and series in history else None
    if found is None:
        return None
    large_is_noisy = LARGE_IS_NOISY[kind]
    layers = [
        RankedLayer(name, _last(values), _median(values), one.reason)
        for name, one, values in _rows(series, found, history)
    ]
    sign = -1 if large_is_noisy else 1
    layers.sort(key=lambda one: (math.isnan(one.median), sign * one.median))
    label = source.view.label
    return NoiseRanking(series, found.noun, label, large_is_noisy, tuple(layers))


def _rows(series: str, found: Layout, history: History) -> list[tuple[str, Line, Floats]]:
    """The name, the line and the values of each layer; a value without a bound is infinite.

    A noise scale is tr(Σ)/‖G‖², and a NaN where the estimate of the denominator isn't positive.
    """
    rows = row_lines(history[series], found, history)
    if found.field != "value":
        return [(name, one, one.values) for name, one in rows.items()]
    norms = row_lines(history[series], replace(found, field="squared_norm"), history)
    return [
        (name, one, np.where(np.isnan(one.values) & (norms[name].values <= 0), np.inf, one.values))
        for name, one in rows.items()
    ]


def _last(values: Floats) -> float:
    return float(values[-1]) if values.size else math.nan


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    with np.errstate(invalid="ignore"):  # +∞ and −∞ have no mean
        # Of halves, since the sum of the two middle values may be larger than any float.
        return 2 * float(np.median(known / 2)) if known.size else math.nan
