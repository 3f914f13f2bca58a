"""The trace of a symmetric matrix, estimated from its products with random vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.diagonal import diagonal_sample
from gradlens.curvature.interval import confidence_interval
from gradlens.curvature.orthogonal import direction, projected_out
from gradlens.curvature.probes import Seed, gaussian, rademacher
from gradlens.curvature.products import Products, SymmetricMatrix
from gradlens.history.undefined import Undefined
from gradlens.numerics.running_mean import RunningMean
from gradlens.numerics.unavailable import UnavailableError

ONE_SAMPLE = "one sample has no standard error: take two or more"


@dataclass(frozen=True)
class Estimate:
    """An unbiased estimate, and the standard error of its random part.

    ``samples`` is the number of independent samples that the error is from, ``skewness`` their
    skewness, and ``products`` the number of products with the matrix. A value that can't be had is
    an ``Undefined``, a NaN with its reason.
    """

    value: float
    standard_error: float
    skewness: float
    samples: int
    products: int

    def confidence_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Bounds that hold the true value with probability ``level``, approximately.

        Student's t with Hall's correction for skewed samples. Raises ``ValueError`` for a level
        outside (0, 1). Without a value or an error, both are NaN with the same reason.
        """
        for number in (self.value, self.standard_error):
            if isinstance(number, Undefined):
                return number, number
        # Without an error the interval is a point, even for one sample.
        samples = max(self.samples, 2) if self.standard_error == 0 else self.samples
        low, high = confidence_interval(
            np.array(self.value),
            np.array(self.standard_error),
            np.array(self.skewness),
            samples,
            level,
        )
        return float(low), float(high)


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
    generator = _generator(samples, seed)
    mean = RunningMean()
    try:
        for _ in range(samples):
            terms = diagonal_sample(products, generator)
            mean.add(torch.stack([terms[block].sum() for block in blocks.values()]))
    except UnavailableError as error:
        return dict.fromkeys(blocks, undefined_estimate(samples, products.count, str(error)))
    return dict(zip(blocks, estimates(mean, products.count), strict=True))


def hutch_plus_plus(matrix: SymmetricMatrix, samples: int, seed: Seed = 0) -> Estimate:
    """Trace by Hutch++: exact on a random subspace, Hutchinson's method on the rest.

    tr(QᵀHQ) + mean of zᵀ(I−QQᵀ)H(I−QQᵀ)z over ``samples`` random signs z, where Q spans the
    products of H with as many random vectors (Meyer et al., 2021, Alg. 1): 3·``samples`` products.
    The standard error is that of the mean given Q, whose own part is exact. Better than
    ``hutchinson`` with as many products where few eigenvalues hold most of the trace.

    Raises ``ValueError`` for fewer than one sample.
    """
    products = Products(matrix)
    generator = _generator(samples, seed)
    mean = RunningMean()
    try:
        basis = _range(products, samples, generator)
        exact = sum(float(row @ products(row)) for row in basis)
        for _ in range(samples):
            rest = projected_out(rademacher(products, generator), basis)
            mean.add((rest @ products(rest))[None])
    except UnavailableError as error:
        return undefined_estimate(samples, products.count, str(error))
    (rest_estimate,) = estimates(mean, products.count)
    return replace(rest_estimate, value=exact + rest_estimate.value)


def _range(products: Products, samples: int, generator: np.random.Generator) -> Tensor:
    """Orthonormal rows ``[at most samples, D]`` that span products with random vectors."""
    basis = torch.empty(0, products.size, dtype=torch.float64, device=products.device)
    for _ in range(min(samples, products.size)):
        unit = direction(products(gaussian(products, generator)), basis)
        if unit is not None:
            basis = torch.cat([basis, unit[None]])
    return basis


def _generator(samples: int, seed: Seed) -> np.random.Generator:
    if samples < 1:
        raise ValueError(f"{samples} samples: take one at least, two for a standard error")
    return np.random.default_rng(seed)


def estimates(mean: RunningMean, products: int) -> list[Estimate]:
    """An estimate for each element of a mean ``[K]`` of independent samples."""
    moments = torch.stack([mean.mean, mean.standard_error(), mean.skewness()], dim=1).tolist()
    return [
        Estimate(value, _defined(standard_error), skewness, mean.samples, products)
        for value, standard_error, skewness in moments
    ]


def undefined_estimate(samples: int, products: int, reason: str) -> Estimate:
    """NaNs with their reason, in place of an estimate."""
    nan = Undefined(reason)
    return Estimate(nan, nan, nan, samples, products)


def _defined(standard_error: float) -> float:
    return Undefined(ONE_SAMPLE) if np.isnan(standard_error) else standard_error
