"""Trace and diagonal by estimators in which all random vectors are exchangeable.

Each vector in turn is the probe of Hutchinson's method for what the products with the others leave
of the matrix, on whose span the matrix is known exactly (Epperly, Tropp and Webber, 2024).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.diagonal import DiagonalEstimate
from gradlens.curvature.orthogonal import NEGLIGIBLE
from gradlens.curvature.probes import Seed, gaussian, rademacher
from gradlens.curvature.products import Products, SymmetricMatrix
from gradlens.curvature.trace import Estimate, undefined_estimate
from gradlens.numerics.running_mean import RunningMean
from gradlens.numerics.unavailable import UnavailableError

CORRELATION = 2**0.5
"""The standard error of the mean over all probes, over that of as many independent estimates.

Each pair of probes contributes to the estimates of both, which doubles the variance of their mean.
Measured with 3 to 20 probes on spectra from flat to fast decaying, of 200 estimates or more each,
it is 0.99 to 1.44 for the trace and 1.03 to 1.16 for the diagonal.
"""


class _Sketch:
    """Products Y = HΩ of probes Ω ``[k, D]``, a basis Q ``[r, D]`` of their span, and Z = HQ.

    All are rows. ``left_out`` ``[k, r]`` are the unit vectors, in the coordinates of the basis,
    that the span loses without one of the products; zero where it loses nothing.
    """

    def __init__(self, products: Products, probes: Tensor) -> None:
        self.probes = probes
        self.products = products.many(probes)
        _, sizes, directions = torch.linalg.svd(self.products, full_matrices=False)
        self.basis = directions[sizes > NEGLIGIBLE * sizes.max()]
        self.images = products.many(self.basis) if len(self.basis) else self.basis
        self.coordinates = self.products @ self.basis.T
        if len(self.basis) == len(probes):
            inverse = torch.linalg.inv(self.coordinates).T
            self.left_out = inverse / inverse.norm(dim=1, keepdim=True)
        else:
            self.left_out = torch.zeros_like(self.coordinates)

    def without_own(self, coordinates: Tensor) -> Tensor:
        """Coordinates ``[k, r]`` in the span of the others' products, row by row."""
        along = (coordinates * self.left_out).sum(1, keepdim=True)
        return coordinates - along * self.left_out


def xtrace(matrix: SymmetricMatrix, samples: int, seed: Seed = 0) -> Estimate:
    """Trace by XTrace (Epperly, Tropp and Webber, 2024, Sec. 2.1), in 2·``samples`` products.

    The mean over i of tr(QᵢᵀHQᵢ) and an estimate of the rest's trace from the i-th probe, where Qᵢ
    spans the products with the other probes. The standard error is that between these estimates,
    which are correlated. Exact where the matrix's rank is below ``samples``, and better than
    ``hutchinson`` with as many products where eigenvalues decay. Of a matrix over data, the
    products take two passes. Memory is that of about 6·``samples`` vectors in float64.

    Raises ``ValueError`` for fewer than two samples.
    """
    products = Products(matrix)
    generator = _generator(samples, seed)
    size = products.size
    count = min(samples, size)
    try:
        sketch = _Sketch(
            products, torch.stack([gaussian(products, generator) for _ in range(count)])
        )
    except UnavailableError as error:
        return undefined_estimate(products.count, str(error))
    inner = sketch.basis @ sketch.images.T
    kept = sketch.without_own(sketch.probes @ sketch.basis.T)
    rest = sketch.probes - kept @ sketch.basis
    rest_products = sketch.products - kept @ sketch.images
    exact = inner.trace() - ((sketch.left_out @ inner) * sketch.left_out).sum(1)
    # A probe's direction in the rest is uniform, and its length is of no use (Sec. 2.3).
    dimension = size - (count - 1 if bool(sketch.left_out.any()) else len(sketch.basis))
    squares = rest.square().sum(1)
    tiny = squares <= NEGLIGIBLE**2 * sketch.probes.square().sum(1)
    quotients = torch.where(tiny, 0.0, (rest * rest_products).sum(1) / squares)
    draws = exact + dimension * quotients
    spread = CORRELATION * float(draws.std()) / count**0.5 if count > 1 else 0.0
    return Estimate(float(draws.mean()), spread, max(count - 1, 1), products.count)


def xdiag(matrix: SymmetricMatrix, samples: int, seed: Seed = 0) -> DiagonalEstimate:
    """Diagonal by XDiag (Epperly, Tropp and Webber, 2024, Sec. 2.4), in 2·``samples`` products.

    As ``xtrace``, with random signs as probes and Hutchinson's estimate of the rest's diagonal.
    Better than ``hutchinson_diagonal`` with as many products where few eigenvalues dominate. Raises
    ``ValueError`` for fewer than two samples.
    """
    products = Products(matrix)
    generator = _generator(samples, seed)
    count = min(samples, products.size)
    try:
        probes = torch.stack([rademacher(products, generator) for _ in range(count)])
        sketch = _Sketch(products, probes)
    except UnavailableError as error:
        nan = np.full(products.size, np.nan)
        return DiagonalEstimate(nan, nan.copy(), count, str(error))
    exact = (sketch.basis * sketch.images).sum(0)
    rest = sketch.products - sketch.without_own(sketch.coordinates) @ sketch.basis
    mean = RunningMean()
    for probe, left_out, product in zip(sketch.probes, sketch.left_out, rest, strict=True):
        lost = (left_out @ sketch.basis) * (left_out @ sketch.images)
        mean.add(exact - lost + probe * product)
    spread = CORRELATION * mean.standard_error()
    return DiagonalEstimate(mean.mean.cpu().numpy(), spread.cpu().numpy(), count)


def _generator(samples: int, seed: Seed) -> np.random.Generator:
    if samples < 2:
        raise ValueError(f"{samples} samples: take two at least")
    return np.random.default_rng(seed)
