"""Operators that are made of others: over uses of a parameter, rows of a sample, or batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from gradlens.numerics.deviations import SampleDeviations
from gradlens.operators.operator import GradientOperator
from gradlens.operators.outer_products import OuterProducts
from gradlens.operators.table_rows import IndexedRows


class Composed(GradientOperator):
    """Gradients of one parameter that are computed from those of ``parts``."""

    def __init__(self, parts: Sequence[GradientOperator], batch_size: int) -> None:
        first, dtype = parts[0], parts[0].dtype
        for part in parts[1:]:
            dtype = torch.promote_types(dtype, part.dtype)
        self._parts = tuple(parts)
        eps = max(part.eps for part in parts)
        super().__init__(batch_size, first.shape, dtype, first.device, eps)

    @property
    def is_unchanged(self) -> bool:
        return all(part.is_unchanged for part in self._parts)

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return [tensor for part in self._parts for tensor in part._tensors]

    def _workspace(self) -> int:
        return max(part._workspace() for part in self._parts)


class Summed(Composed):
    """gₙ = Σᵤ gₙᵤ over the uses u of a tied weight or of a module that is called repeatedly."""

    makes_blocks = True

    def __init__(self, uses: Sequence[GradientOperator]) -> None:
        super().__init__(uses, uses[0].batch_size)

    def _workspace(self) -> int:
        in_place = all(isinstance(use, IndexedRows) for use in self._parts[1:])
        return super()._workspace() + (0 if in_place else self._rows * self._columns)

    def _block(self, samples: slice, rows: slice) -> Tensor:
        first, *others = self._parts
        block = first._block(samples, rows).to(self.dtype, copy=not first.makes_blocks)
        for use in others:
            use._add_block(block, samples, rows)
        return block

    def _keep_only(self, samples: Tensor) -> None:
        self._parts = tuple(use.some(samples) for use in self._parts)

    def _dot(self, direction: Tensor) -> Tensor:
        return torch.stack([use._dot(direction) for use in self._parts]).sum(0)

    def sum(self) -> Tensor:
        return self._total([use.sum() for use in self._parts])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._total([use.weighted_sum(weights) for use in self._parts])

    def _total(self, sums: Sequence[Tensor]) -> Tensor:
        return torch.stack([each.to(self.dtype) for each in sums]).sum(0)


def summed(uses: Sequence[GradientOperator]) -> GradientOperator:
    """The one use, or the sum of several.

    Those of a linear layer, such as a recurrent network's at each of its steps, become one sum of
    outer products.
    """
    outer = [use for use in uses if isinstance(use, OuterProducts)]
    others = [use for use in uses if not isinstance(use, OuterProducts)]
    together = [outer[0] if len(outer) == 1 else _one_after_another(outer, 1)] if outer else []
    parts = [*together, *others]
    return parts[0] if len(parts) == 1 else Summed(parts)


def _one_after_another(operators: Sequence[OuterProducts], axis: int) -> OuterProducts:
    """Outer products of all, with factors that are joined along an axis."""
    sides = zip(*(each.factors() for each in operators), strict=True)
    delta, inputs = (torch.cat(side, dim=axis) for side in sides)
    return OuterProducts(delta, inputs, eps=max(each.eps for each in operators))


class Grouped(Composed):
    """gₙ = Σⱼ of the gradients of the ``size`` rows n·size + j."""

    def __init__(self, by_row: GradientOperator, size: int) -> None:
        super().__init__([by_row], by_row.batch_size // size)
        self._size = size

    @property
    def _by_row(self) -> GradientOperator:
        return self._parts[0]

    @property
    def is_worth_storing(self) -> bool:
        return self._by_row.is_worth_storing

    def _workspace(self) -> int:
        return self._size * (self._rows * self._columns + super()._workspace())

    def _block(self, samples: slice, rows: slice) -> Tensor:
        together = slice(samples.start * self._size, samples.stop * self._size)
        return self._sums(self._by_row._block(together, rows))

    def _keep_only(self, samples: Tensor) -> None:
        offsets = torch.arange(self._size, device=samples.device)
        rows = (samples[:, None] * self._size + offsets).flatten()
        self._parts = (self._by_row.some(rows),)

    def _dot(self, direction: Tensor) -> Tensor:
        return self._sums(self._by_row._dot(direction))

    def sum(self) -> Tensor:
        return self._by_row.sum()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._by_row.weighted_sum(weights.repeat_interleave(self._size))

    def _sums(self, by_row: Tensor) -> Tensor:
        return by_row.unflatten(0, (-1, self._size)).sum(1)


class Joined(Composed):
    """gₙ of several batches, one after another, each batch times its factor."""

    def __init__(self, parts: Sequence[GradientOperator], factors: Sequence[float]) -> None:
        super().__init__(parts, sum(part.batch_size for part in parts))
        self._factors = list(factors)

    def _block(self, samples: slice, rows: slice) -> Tensor:
        blocks = []
        for part, factor, start in self._placed():
            begin, end = max(samples.start - start, 0), min(samples.stop - start, part.batch_size)
            if begin < end:
                blocks.append(factor * part._block(slice(begin, end), rows).to(self.dtype))
        return torch.cat(blocks)

    def _keep_only(self, samples: Tensor) -> None:
        self._parts = tuple(
            part.some(samples[(samples >= start) & (samples < start + part.batch_size)] - start)
            for part, _, start in self._placed()
        )

    def squared_norms(self) -> Tensor:
        return torch.cat([f**2 * part.squared_norms() for part, f, _ in self._placed()])

    def _deviations_about(self, centre: Tensor) -> SampleDeviations:
        found = [
            part._deviations_about((centre / factor).to(part.dtype)).times(factor)
            for part, factor, _ in self._placed()
        ]
        return reduce(SampleDeviations.merge, found)

    def _dot(self, direction: Tensor) -> Tensor:
        return torch.cat([factor * part._dot(direction) for part, factor, _ in self._placed()])

    def sum(self) -> Tensor:
        total = self._zeros(*self.shape)
        for part, factor, _ in self._placed():
            total += factor * part.sum()
        return total

    def sum_of_squares(self) -> Tensor:
        total = self._double_zeros(*self.shape)
        for part, factor, _ in self._placed():
            total += factor**2 * part.sum_of_squares()
        return total

    def _placed(self) -> Iterator[tuple[GradientOperator, float, int]]:
        """Parts with their factors, and the number of their first sample."""
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


def gram_of_passes(
    passes: Sequence[GradientOperator], others: Sequence[GradientOperator] | None = None
) -> Tensor:
    """⟨gₖₙ, gₗₘ⟩ of every pair of passes k, l and samples n, m, in float64 ``[K·N, L·M]``.

    Without passes of ``others``, of the same ones. Rows and columns are those of the first pass,
    followed by those of the next one.
    """
    with torch.no_grad():
        other = None if others is None else _joined(others)
        return _joined(passes).gram(other, BLOCK_BYTES)


def _joined(passes: Sequence[GradientOperator]) -> GradientOperator:
    outer = [each for each in passes if isinstance(each, OuterProducts)]
    if len(outer) == len(passes):
        return _one_after_another(outer, 0)
    return Joined(passes, [1.0] * len(passes))
