"""Samples of several backward passes as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradlens.numerics.deviations import SampleDeviations, coarsest
from gradlens.numerics.norms import norm, products_of_pairs, scale_of
from gradlens.numerics.precision import double
from gradlens.operators.operator import GradientOperator, slices
from gradlens.operators.outer_product import OuterProduct


class Joined(GradientOperator):
    """gₙ of several batches, one after another, each batch times its factor."""

    def __init__(self, parts: Sequence[GradientOperator], factors: Sequence[float]) -> None:
        first = parts[0]
        dtype = first.dtype
        for part in parts[1:]:
            dtype = torch.promote_types(dtype, part.dtype)
        self._parts = tuple(parts)
        self._factors = [f * part.scale for f, part in zip(factors, parts, strict=True)]
        eps = max(part.eps for part in parts)
        samples = sum(part.batch_size for part in parts)
        super().__init__(samples, first.shape, 1.0, dtype, first.device, eps)

    def _workspace(self) -> int:
        return max(part._workspace() for part in self._parts)

    def _block(self, samples: slice, rows: slice) -> Tensor:
        blocks = []
        for part, factor, start in self._placed():
            begin, end = max(samples.start - start, 0), min(samples.stop - start, part.batch_size)
            if begin < end:
                blocks.append(factor * part._block(slice(begin, end), rows).to(self.dtype))
        return torch.cat(blocks)

    @property
    def is_unchanged(self) -> bool:
        return all(part.is_unchanged for part in self._parts)

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return [tensor for part in self._parts for tensor in part._tensors]

    def _keep_only(self, samples: Tensor) -> None:
        self._parts = tuple(
            part.some(samples[(samples >= start) & (samples < start + part.batch_size)] - start)
            for part, _, start in self._placed()
        )

    def _squared_norms(self) -> Tensor:
        found = [factor**2 * part._squared_norms() for part, factor, _ in self._placed()]
        return torch.cat(found)

    def _deviations_about(self, centre: Tensor) -> SampleDeviations:
        found = [
            part._deviations_about((centre / factor).to(part.dtype)).times(factor)
            for part, factor, _ in self._placed()
        ]
        squared_norms, dots = (
            torch.cat(each) for each in ([f.squared_norms for f in found], [f.dots for f in found])
        )
        return SampleDeviations(
            squared_norms, dots, double(norm(centre)).square(), *coarsest(found)
        )

    def _dot(self, matrix: Tensor) -> Tensor:
        found = [f * part._dot(matrix.to(part.dtype)) for part, f, _ in self._placed()]
        return torch.cat([dots.to(self.dtype) for dots in found])

    def _sum(self) -> Tensor:
        total = torch.zeros(self._rows, self._columns, dtype=self.dtype, device=self.device)
        for part, factor, _ in self._placed():
            total += factor * part._sum()
        return total

    def _sum_of_squares(self) -> Tensor:
        total = self._double_zeros(self._rows, self._columns)
        for part, factor, _ in self._placed():
            total += factor**2 * part._sum_of_squares()
        return total

    def _placed(self) -> Iterator[tuple[GradientOperator, float, int]]:
        start = 0
        for part, factor in zip(self._parts, self._factors, strict=True):
            yield part, factor, start
            start += part.batch_size


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
