"""Estimates of numbers with their errors; of a matrix, by products with random signs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from gradlens.curvature.products import Products, Seed, SymmetricMatrix, signs_like
from gradlens.history.undefined import Undefined
from gradlens.numerics.running_statistics import RunningMean
from gradlens.numerics.unavailable import UnavailableError

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


# By Hutchinson's method ---------------------------------------------------------------------


def hutchinson(matrix: SymmetricMatrix, samples: int, seed: Seed = 0) -> Estimate:
    """Trace as the mean of zᵀHz over random signs z (Hutchinson, 1990, Prop. 1).

    A diagonal matrix's is exact. Raises ``ValueError`` for fewer than one sample.
    """
    return hutchinson_blocks(matrix, {"": slice(None)}, samples, seed)[""]


def hutchinson_blocks(
    matrix: SymmetricMatrix, blocks: Mapping[str, slice], samples: int, seed: Seed = 0
) -> dict[str, Estimate]:
    """Traces of diagonal blocks, all from the same probes.

    The mean of Σᵢ zᵢ(Hz)ᵢ over the rows i of a block, in which the coupling to other blocks has
    mean zero. ``blocks`` maps names to slices of the flat vector (``operator.slices``), which may
    overlap. Raises ``ValueError`` for fewer than one sample.
    """
    products = Products(matrix)
    try:
        diagonal = probed_diagonal(products, samples, seed)
    except UnavailableError as error:
        return dict.fromkeys(blocks, undefined_estimate(products.count, str(error)))
    traces = hutchinson_estimates(diagonal, blocks.values(), products.count)
    return dict(zip(blocks, traces, strict=True))


def hutchinson_estimates(
    diagonal: RunningMean, blocks: Iterable[slice], products: int
) -> list[Estimate]:
    """Traces of diagonal blocks from the elements z∘Hz ``[D]`` of each probe z.

    The variance of zᵀHz is 2·Σᵢ≠ⱼHᵢⱼ² (Hutchinson, 1990, Prop. 1), twice the sum of the
    elements' variances Σⱼ≠ᵢHᵢⱼ². That sum is known far better than the variance of a few numbers
    zᵀHz. If one eigenvalue dominates, it has one degree of freedom for each probe, and otherwise
    more. Of a block's trace, it is an upper bound, up to √2 too large: where the block's rows are
    coupled to other blocks, each of their elements' variances counts once.
    """
    variances = 2 * diagonal.standard_error().square()
    return [
        Estimate(
            float(diagonal.mean[block].sum()),
            defined(float(variances[block].sum().sqrt())),
            diagonal.samples,
            products,
        )
        for block in blocks
    ]


@dataclass(frozen=True)
class DiagonalEstimate:
    """Unbiased estimates ``diagonal`` ``[D]`` with their ``standard_error`` ``[D]``.

    All are from the same ``samples`` probes, so that an element's error has one degree of freedom
    less. The standard error is NaN for one probe; where the diagonal is NaN too, ``reason`` says
    why.
    """

    diagonal: NDArray[np.float64]
    standard_error: NDArray[np.float64]
    samples: int
    reason: str = ""


def hutchinson_diagonal(matrix: SymmetricMatrix, samples: int, seed: Seed = 0) -> DiagonalEstimate:
    """Diagonal as the mean of z∘Hz over random signs z (Bekas et al., 2007, Eq. 2).

    A diagonal matrix's is exact. Raises ``ValueError`` for fewer than one sample.
    """
    products = Products(matrix)
    try:
        mean = probed_diagonal(products, samples, seed)
    except UnavailableError as error:
        nan = np.full(products.size, np.nan)
        return DiagonalEstimate(nan, nan.copy(), samples, str(error))
    return DiagonalEstimate(mean.mean.cpu().numpy(), mean.standard_error().cpu().numpy(), samples)


def frobenius_norm(matrix: SymmetricMatrix, samples: int, seed: Seed = 0) -> Estimate:
    """√(Σᵢⱼ Hᵢⱼ²) as the root of the mean of ‖Hz‖² over random signs z.

    The mean is an unbiased estimate of the square, the trace of H² (Hutchinson, 1990, Prop. 1). The
    root's standard error is that of the mean over twice the root. Exact for a diagonal matrix.
    Raises ``ValueError`` for fewer than one sample.
    """
    products = Products(matrix)
    try:
        squares = [image.square().sum() for _, image in _probed(products, samples, seed)]
    except UnavailableError as error:
        return undefined_estimate(products.count, str(error))
    (square,) = positive_estimates(torch.stack(squares)[:, None], products.count)
    norm = math.sqrt(square.value)
    if isinstance(square.standard_error, Undefined) or norm == 0:
        return replace(square, value=norm)
    return replace(square, value=norm, standard_error=square.standard_error / (2 * norm))


def probed_diagonal(products: Products, samples: int, seed: Seed) -> RunningMean:
    """Mean of z∘Hz ``[D]`` over random signs z, which estimates the diagonal.

    Raises ``ValueError`` for fewer than one sample.
    """
    mean = RunningMean()
    for probe, image in _probed(products, samples, seed):
        mean.add(probe * image)
    return mean


def _probed(products: Products, samples: int, seed: Seed) -> Iterator[tuple[Tensor, Tensor]]:
    """Random signs z ``[D]`` with Hz; ``ValueError`` for fewer than one sample."""
    if samples < 1:
        raise ValueError(f"{samples} samples: take one at least, two for a standard error")
    generator = np.random.default_rng(seed)
    return products.each(signs_like(products.like, generator) for _ in range(samples))
