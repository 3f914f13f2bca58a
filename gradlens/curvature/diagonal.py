"""The diagonal of a symmetric matrix, estimated from its products with random vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradlens.curvature.probes import Seed, rademacher
from gradlens.curvature.products import Products, SymmetricMatrix
from gradlens.numerics.running_mean import RunningMean
from gradlens.numerics.unavailable import UnavailableError


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


def probed_diagonal(products: Products, samples: int, seed: Seed) -> RunningMean:
    """Mean of z∘Hz ``[D]`` over random signs z, which estimates the diagonal.

    Raises ``ValueError`` for fewer than one sample.
    """
    if samples < 1:
        raise ValueError(f"{samples} samples: take one at least, two for a standard error")
    generator = np.random.default_rng(seed)
    mean = RunningMean()
    probes = (rademacher(products, generator) for _ in range(samples))
    for probe, image in products.each(probes):
        mean.add(probe * image)
    return mean


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
