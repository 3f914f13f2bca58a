"""Medians and shares of numbers of which some are NaN."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradlens.history.lines import Floats

Truths = NDArray[np.bool_]

NORMAL = 1.4826
"""Standard deviations of a normal distribution over its median absolute deviation."""


def finite(values: ArrayLike) -> Floats:
    """Those that are neither NaN nor infinite."""
    found = np.asarray(values, dtype=np.float64)
    return found[np.isfinite(found)]


def median(values: ArrayLike) -> float:
    """The median of the finite values; NaN if there are none."""
    found = finite(values)
    return float(np.median(found)) if found.size else float("nan")


def mean(values: ArrayLike) -> float:
    """The mean of the finite values; NaN if there are none."""
    found = finite(values)
    return float(found.mean()) if found.size else float("nan")


def medians(table: Floats) -> Floats:
    """The median of the finite values of each column of ``[M, K]``; NaN where there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of columns without any
        found: Floats = np.nanmedian(np.where(np.isfinite(table), table, np.nan), axis=0)
    return found


def largest(values: ArrayLike) -> float:
    """The largest finite value; NaN if there is none."""
    found = finite(values)
    return float(found.max()) if found.size else float("nan")


def smallest(values: ArrayLike) -> float:
    """The smallest finite value; NaN if there is none."""
    return -largest(-np.asarray(values, dtype=np.float64))


def share(holds: Truths, known: Truths | None = None) -> float:
    """The share of places where something holds, of those where it is known; NaN without any."""
    chosen = holds if known is None else holds[known]
    return float(chosen.mean()) if chosen.size else float("nan")


def first(holds: Truths) -> int | None:
    """The first place where something holds; ``None`` if there is none."""
    places = np.flatnonzero(holds)
    return int(places[0]) if places.size else None


def since(holds: Truths) -> int:
    """The place from which on something holds up to the end; their number if it doesn't there."""
    return int(np.flatnonzero(np.append(True, ~holds))[-1])


def deviation(values: Floats, middle: float) -> float:
    """The robust standard deviation of values from their middle; NaN if there are none."""
    return NORMAL * median(np.abs(values - middle))


def ratio(one: ArrayLike, other: ArrayLike) -> Floats:
    """Quotients; NaN where there is none."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found = np.asarray(one, dtype=np.float64) / np.asarray(other, dtype=np.float64)
    return np.where(np.isfinite(found), found, np.nan)


def smooth(values: Floats, width: int) -> Floats:
    """Medians of so many consecutive values each ``[K // width]``; of fewer at the end."""
    pieces = [values[start : start + width] for start in range(0, len(values), max(width, 1))]
    return np.array([median(piece) for piece in pieces])
