"""Estimates of numbers, with their errors and confidence intervals."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from gradlens.history.undefined import Undefined

ONE_SAMPLE = "one sample has no standard error: take two or more"

LARGEST_EXPONENT = math.log(sys.float_info.max) / 2
"""Of e, so that its power times a number of any usual size is in the range."""


@dataclass(frozen=True)
class Estimate:
    """An unbiased estimate, and the standard error of its random part.

    ``degrees_of_freedom`` are those of Student's t for the interval, and ``products`` is the number
    of products with the matrix. ``positive`` says that the estimated number can't be negative. A
    value that can't be had is an ``Undefined``, a NaN with its reason.
    """

    value: float
    standard_error: float
    degrees_of_freedom: float
    products: int
    positive: bool = False

    def confidence_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Bounds that hold the true value with probability ``level``, approximately.

        Student's t; of a number that can't be negative, for its logarithm. Raises ``ValueError``
        for a level outside (0, 1). Without a value or an error, both are NaN with the same reason.
        """
        for number in (self.value, self.standard_error):
            if isinstance(number, Undefined):
                return number, number
        half = self.standard_error * float(t_quantile(self.degrees_of_freedom, level))
        if self.positive and half > 0:
            factor = math.exp(min(half / self.value, LARGEST_EXPONENT))
            return self.value / factor, self.value * factor
        return self.value - half, self.value + half


def weighted_sum(estimates: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """Σᵢ wᵢ times independent estimates, with weights above zero.

    Degrees of freedom are those of a sum of variances (Satterthwaite, 1946). Without one of the
    errors, there is none of the sum, for the same reason.
    """
    pairs = list(zip(weights, estimates, strict=True))
    variances = [(weight * each.standard_error) ** 2 for weight, each in pairs]
    squares = [v**2 / each.degrees_of_freedom for v, each in zip(variances, estimates, strict=True)]
    errors = (each.standard_error for each in estimates)
    unknown = next((error for error in errors if isinstance(error, Undefined)), None)
    return Estimate(
        sum(weight * each.value for weight, each in pairs),
        unknown or math.sqrt(sum(variances)),
        sum(variances) ** 2 / sum(squares) if sum(squares) else 1,
        sum(each.products for each in estimates),
        all(each.positive for each in estimates),
    )


def positive_estimates(draws: Tensor, products: int) -> list[Estimate]:
    """Means of independent draws ``[S, K]`` of numbers that can't be negative."""
    return _positive(draws, torch.full_like(draws[0], max(len(draws) - 1, 1)), products)


def estimates_of_one_draw(samples: Tensor, products: int) -> list[Estimate]:
    """Means over the batch's samples ``[N, K]`` of numbers that can't be negative.

    Degrees of freedom are those of a sum of variances with one each (Satterthwaite, 1946): a sample
    that dominates the sum leaves one.
    """
    squares = (samples - samples.mean(0)).square()
    freedom = squares.sum(0).square() / squares.square().sum(0)
    return _positive(
        samples, freedom.nan_to_num(nan=1.0).clamp(1, max(len(samples) - 1, 1)), products
    )


def _positive(samples: Tensor, degrees_of_freedom: Tensor, products: int) -> list[Estimate]:
    nan = torch.full_like(samples[0], torch.nan)
    errors = samples.std(0) / math.sqrt(len(samples)) if len(samples) > 1 else nan
    rows = torch.stack([samples.mean(0), errors, degrees_of_freedom], dim=1).tolist()
    return [
        Estimate(mean, defined(error), freedom, products, positive=True)
        for mean, error, freedom in rows
    ]


def undefined_estimate(products: int, reason: str) -> Estimate:
    """NaNs with their reason, in place of an estimate."""
    nan = Undefined(reason)
    return Estimate(nan, nan, nan, products)


def defined(standard_error: float) -> float:
    """The error itself, or if it is NaN, that of a single sample, with its reason."""
    return Undefined(ONE_SAMPLE) if math.isnan(standard_error) else standard_error


def t_quantile(degrees_of_freedom: float | NDArray[np.float64], level: float) -> NDArray[Any]:
    """Half the width of a confidence interval of Student's t, in standard errors.

    Of the shape of the degrees of freedom. Raises ``ValueError`` for a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"the level is {level}: pass a probability between 0 and 1")
    return np.asarray(stdtrit(degrees_of_freedom, (1 + level) / 2))
