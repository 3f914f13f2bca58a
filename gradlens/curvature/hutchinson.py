"""Hutchinson's estimates of a symmetric matrix's trace, diagonal and norm.

They come from its products with vectors of random signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.curvature.estimate import Estimate, defined, positive_estimates, undefined_estimate
from gradlens.curvature.products import Products, Seed, SymmetricMatrix, signs_like
from gradlens.history.undefined import Undefined
from gradlens.numerics.running_statistics import RunningMean
from gradlens.numerics.unavailable import UnavailableError


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
