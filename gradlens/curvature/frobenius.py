"""The Frobenius norm of a symmetric matrix, estimated from its products with random vectors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from gradlens.curvature.probes import Seed, rademacher
from gradlens.curvature.products import Products, SymmetricMatrix
from gradlens.curvature.trace import Estimate, positive_estimates, undefined_estimate
from gradlens.history.undefined import Undefined
from gradlens.numerics.unavailable import UnavailableError


def frobenius_norm(matrix: SymmetricMatrix, samples: int, seed: Seed = 0) -> Estimate:
    """√(Σᵢⱼ Hᵢⱼ²) as the root of the mean of ‖Hz‖² over random signs z.

    The mean is an unbiased estimate of the square, the trace of H² (Hutchinson, 1990, Prop. 1). The
    root's standard error is that of the mean over twice the root. Exact for a diagonal matrix.
    Raises ``ValueError`` for fewer than one sample.
    """
    if samples < 1:
        raise ValueError(f"{samples} samples: take one at least, two for a standard error")
    products = Products(matrix)
    generator = np.random.default_rng(seed)
    try:
        probes = (rademacher(products, generator) for _ in range(samples))
        squares = [image.square().sum() for _, image in products.each(probes)]
    except UnavailableError as error:
        return undefined_estimate(products.count, str(error))
    (square,) = positive_estimates(torch.stack(squares)[:, None], products.count)
    norm = math.sqrt(square.value)
    if isinstance(square.standard_error, Undefined) or norm == 0:
        return replace(square, value=norm)
    return replace(square, value=norm, standard_error=square.standard_error / (2 * norm))
