"""Checks of matrices and diagonals against products of the loss's own matrix."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.probes import Seed, gaussian
from gradlens.curvature.products import Products
from gradlens.numerics.host import on_host

ROUNDING = 100
"""Rounding errors that the products of equal matrices may differ by, relative to the whole product.

Each comes from passes through the network and back that sum in other orders. A trade-off: a block
whose part of the product is smaller than these isn't checked.
"""

_DIAGONAL_ROUNDING = 10
"""The same for one element, as a multiple of both tolerances in ``has_diagonal``."""


def same_matrix(matrix: CurvatureOperator, other: CurvatureOperator, seed: Seed) -> bool:
    """Whether two matrices over the same parameters are equal but for rounding.

    Different matrices have the same product with a random vector with probability zero. Products
    are compared parameter by parameter, to half of their digits, so that a parameter of little
    curvature counts as much as the others. Raises ``UnavailableError`` for NaN or Inf.
    """
    products = Products(matrix)
    vector = gaussian(products, np.random.default_rng(seed))
    expected = products(vector)
    difference = other.multiply(vector).to(expected) - expected
    noise = ROUNDING * products.eps * expected.norm()
    agree = [
        difference[block].norm() <= products.eps**0.5 * expected[block].norm() + noise
        for block in matrix.slices.values()
    ]
    return bool(torch.stack(agree).all())


def has_diagonal(matrix: CurvatureOperator, values: Mapping[str, Tensor], seed: Seed) -> bool:
    """Whether one element of the diagonal ``values`` is that of the matrix, but for rounding.

    It is the largest of a random parameter, or a random one where all of these are zero.
    """
    generator = np.random.default_rng(seed)
    name = list(values)[int(generator.integers(len(values)))]
    diagonal = values[name].flatten()
    flat = int(generator.integers(len(diagonal)))
    place = int(diagonal.abs().argmax()) if bool(diagonal.any()) else flat
    unit = torch.zeros(matrix.shape[0], dtype=matrix.torch_dtype, device=matrix.device)
    unit[matrix.slices[name].start + place] = 1
    truth = float(matrix.multiply(unit)[matrix.slices[name]][place])
    largest = max(map(float, on_host([others.abs().max() for others in values.values()])))
    eps = torch.finfo(matrix.torch_dtype).eps
    difference = abs(float(diagonal[place]) - truth)
    return not difference > _DIAGONAL_ROUNDING * (eps**0.5 * abs(truth) + eps * largest)
