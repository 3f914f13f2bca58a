"""The Gram matrix of one parameter's per-sample gradients in several backward passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlens.numerics.norms import products_of_pairs, scale_of
from gradlens.numerics.precision import double
from gradlens.per_sample.operators.joined import Joined
from gradlens.per_sample.operators.operator import GradientOperator, slices
from gradlens.per_sample.operators.outer_product import OuterProduct

BLOCK_BYTES = 128 * 2**20
"""Bound of the memory of some rows of all gradients of all passes.

A trade-off: what rows have in common, such as the patches of a convolution, is computed for each
block again, and larger blocks take more memory than the rest of a Gram matrix of a thousand
gradients.
"""


def gram_of_passes(passes: Sequence[GradientOperator]) -> Tensor:
    """⟨gₖₙ, gₗₘ⟩ of every pair of passes k, l and samples n, m, in float64 ``[K·N, K·N]``.

    Rows and columns are those of the first pass, followed by those of the next one.
    """
    with torch.no_grad():
        outer = [each for each in passes if isinstance(each, OuterProduct)]
        return _by_factors(outer) if len(outer) == len(passes) else _by_elements(passes)


def _by_factors(passes: Sequence[OuterProduct]) -> Tensor:
    factors = [each.factors() for each in passes]
    scaled = [each.scale * delta[:, 0] for each, (delta, _) in zip(passes, factors, strict=True)]
    return OuterProduct(torch.cat(scaled), torch.cat([x[:, 0] for _, x in factors])).gram()


def _by_elements(passes: Sequence[GradientOperator]) -> Tensor:
    joined = Joined(passes, [1.0] * len(passes))
    everyone = slice(0, joined.batch_size)
    bytes_per_row = joined.batch_size * joined._columns * joined.dtype.itemsize
    gram = joined._double_zeros(joined.batch_size, joined.batch_size)
    for rows in slices(joined._rows, BLOCK_BYTES // max(bytes_per_row, 1)):
        block = joined._rows_of(everyone, rows).flatten(1)
        size = scale_of(block)
        gram += double(products_of_pairs(block.div_(size))) * double(size).square()
    return gram
