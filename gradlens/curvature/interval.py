"""Confidence intervals for the mean of few, possibly skewed samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

_SYMMETRIC = 1e-6
"""Skewness up to which the correction is left out.

The correction is of the size of the skewness, and its rounding errors are about 1e-16 over it.
"""


def confidence_interval(
    mean: NDArray[Any],
    standard_error: NDArray[Any],
    skewness: NDArray[Any],
    samples: int,
    level: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bounds of a two-sided interval for each mean, of the arrays' shape.

    Student's t, with the statistic made symmetric by Hall's cubic transformation (Hall, 1992,
    Sec. 2): where few eigenvalues dominate, samples are so skewed that t alone is too narrow.
    NaN for fewer than two samples. Raises ``ValueError`` for a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"the level is {level}: pass a probability between 0 and 1")
    quantile = float(stdtrit(samples - 1, (1 + level) / 2)) if samples > 1 else np.nan
    low = mean - standard_error * _untransformed(quantile, skewness, samples)
    high = mean - standard_error * _untransformed(-quantile, skewness, samples)
    return low, high


def _untransformed(quantile: float, skewness: NDArray[Any], samples: int) -> NDArray[np.float64]:
    """Value of the t-statistic whose transform is ``quantile``: the inverse of Hall's g₁."""
    skewed = np.abs(skewness) > _SYMMETRIC
    safe = np.where(skewed, skewness, 1.0)
    root = np.sqrt(samples)
    inner = 1 + safe * (quantile / root - safe / (6 * samples))
    return np.where(skewed, 3 * root / safe * (np.cbrt(inner) - 1), quantile)
