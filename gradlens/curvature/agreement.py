"""Whether what was found is that of the loss: compared by products with random vectors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.probes import Seed, gaussian
from gradlens.curvature.products import Products

ROUNDING = 100
"""Rounding errors of a product, in units of the relative rounding error of all of it."""


def same_matrix(matrix: CurvatureOperator, other: CurvatureOperator, seed: Seed) -> bool:
    """Whether two matrices over the same parameters are equal but for rounding.

    Different ones have the same product with a random vector with probability zero. Compared
    parameter by parameter, so that one of little curvature counts as much as the others.
    ``NotFiniteError`` for a matrix with NaN or Inf.
    """
    products = Products(matrix)
    vector = gaussian(products, np.random.default_rng(seed))
    expected = products(vector)
    difference = other.multiply(vector).to(expected) - expected
    noise = ROUNDING * products.eps * expected.norm()
    return all(
        bool(difference[block].norm() <= products.eps**0.5 * expected[block].norm() + noise)
        for block in matrix.slices.values()
    )


def has_diagonal(matrix: CurvatureOperator, values: Mapping[str, Tensor], seed: Seed) -> bool:
    """Whether the largest of one parameter's diagonal ``values`` is the matrix's own.

    The parameter is drawn at random; if its values are all zero, the element is, too.
    """
    generator = np.random.default_rng(seed)
    name = list(values)[int(generator.integers(len(values)))]
    diagonal = values[name].flatten()
    flat = int(generator.integers(len(diagonal)))
    place = int(diagonal.abs().argmax()) if bool(diagonal.any()) else flat
    unit = torch.zeros(matrix.shape[0], dtype=matrix.torch_dtype, device=matrix.device)
    unit[matrix.slices[name].start + place] = 1
    truth = float(matrix.multiply(unit)[matrix.slices[name]][place])
    largest = max(float(others.abs().max()) for others in values.values())
    eps = torch.finfo(matrix.torch_dtype).eps
    difference = abs(float(diagonal[place]) - truth)
    return not difference > 10 * (eps**0.5 * abs(truth) + eps * largest)
