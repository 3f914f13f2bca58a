"""Operators that add up others: over the uses of a parameter, or over the rows of a sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlens.operators.joined import Joined
from gradlens.operators.operator import GradientOperator
from gradlens.operators.outer_product import OuterProduct, SumOfOuterProducts
from gradlens.operators.table_rows import IndexedRows


class Summed(GradientOperator):
    """gₙ = Σᵤ gₙᵤ over the uses u of a tied weight or of a module that is called repeatedly."""

    makes_blocks = True

    def __init__(self, uses: Sequence[GradientOperator]) -> None:
        first = uses[0]
        dtype = first.dtype
        for use in uses[1:]:
            dtype = torch.promote_types(dtype, use.dtype)
        self._uses = tuple(uses)
        eps = max(use.eps for use in uses)
        super().__init__(first.batch_size, first.shape, first.scale, dtype, first.device, eps)

    def _workspace(self) -> int:
        in_place = all(isinstance(use, IndexedRows) for use in self._uses[1:])
        added = 0 if in_place else self._rows * self._columns
        return added + max(use._workspace() for use in self._uses)

    def _block(self, samples: slice, rows: slice) -> Tensor:
        first, *others = self._uses
        block = first._block(samples, rows).to(self.dtype, copy=not first.makes_blocks)
        for use in others:
            use._add_block(block, samples, rows)
        return block

    @property
    def is_unchanged(self) -> bool:
        return all(use.is_unchanged for use in self._uses)

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return [tensor for use in self._uses for tensor in use._tensors]

    def _keep_only(self, samples: Tensor) -> None:
        self._uses = tuple(use.some(samples) for use in self._uses)

    def _dot_in_range(self, direction: Tensor) -> Tensor:
        return torch.stack([use._dot_in_range(direction) for use in self._uses]).sum(0)

    def _dot(self, matrix: Tensor) -> Tensor:
        total = torch.zeros(self.batch_size, dtype=self.dtype, device=self.device)
        for use in self._uses:
            total += use._dot(matrix.to(use.dtype))
        return total

    def _sum(self) -> Tensor:
        total = torch.zeros(self._rows, self._columns, dtype=self.dtype, device=self.device)
        for use in self._uses:
            total += use._sum()
        return total

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        total = torch.zeros(self._rows, self._columns, dtype=self.dtype, device=self.device)
        for use in self._uses:
            total += use._weighted_sum(weights.to(use.dtype))
        return total


def summed(uses: Sequence[GradientOperator]) -> GradientOperator:
    """The one use, or the sum of several.

    Those of a linear layer, such as a recurrent network's at each of its steps, become one sum of
    outer products.
    """
    outer = [use for use in uses if isinstance(use, (OuterProduct, SumOfOuterProducts))]
    others = [use for use in uses if not isinstance(use, (OuterProduct, SumOfOuterProducts))]
    together = [outer[0] if len(outer) == 1 else _joined(outer)] if outer else []
    parts = [*together, *others]
    if len(parts) == 1:
        return parts[0]
    if len({part.scale for part in parts}) > 1:  # elements in memory have theirs in them
        parts = [part if part.scale == 1.0 else Joined([part], [1.0]) for part in parts]
    return Summed(parts)


def _joined(uses: Sequence[OuterProduct | SumOfOuterProducts]) -> SumOfOuterProducts:
    factors = [use.factors() for use in uses]
    dtype = factors[0][0].dtype
    for delta, _ in factors[1:]:
        dtype = torch.promote_types(dtype, delta.dtype)
    delta, inputs = (
        torch.cat([each.to(dtype) for each in side], dim=1) for side in zip(*factors, strict=True)
    )
    return SumOfOuterProducts(delta, inputs, uses[0].scale)


class Grouped(GradientOperator):
    """gₙ = Σⱼ of the gradients of the ``size`` rows n·size + j."""

    def __init__(self, by_row: GradientOperator, size: int) -> None:
        samples = by_row.batch_size // size
        super().__init__(
            samples, by_row.shape, by_row.scale, by_row.dtype, by_row.device, by_row.eps
        )
        self._by_row = by_row
        self._size = size

    @property
    def elementwise(self) -> bool:
        return self._by_row.elementwise

    @property
    def is_worth_storing(self) -> bool:
        return self._by_row.is_worth_storing

    def _workspace(self) -> int:
        return self._size * (self._rows * self._columns + self._by_row._workspace())

    def _block(self, samples: slice, rows: slice) -> Tensor:
        together = slice(samples.start * self._size, samples.stop * self._size)
        return self._by_row._block(together, rows).unflatten(0, (-1, self._size)).sum(1)

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return self._by_row._tensors

    def _keep_only(self, samples: Tensor) -> None:
        offsets = torch.arange(self._size, device=samples.device)
        self._by_row = self._by_row.some((samples[:, None] * self._size + offsets).flatten())

    def _dot(self, matrix: Tensor) -> Tensor:
        return self._by_row._dot(matrix).unflatten(0, (-1, self._size)).sum(1)

    def _sum(self) -> Tensor:
        return self._by_row._sum()

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        return self._by_row._weighted_sum(weights.repeat_interleave(self._size))
