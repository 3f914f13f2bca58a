"""Parameters that are used more than once in a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlens.individual.operator import GradientOperator


class Summed(GradientOperator):
    """gₙ = Σᵤ gₙᵤ over the uses u of a tied weight or of a module that is called repeatedly."""

    def __init__(self, uses: Sequence[GradientOperator]) -> None:
        first = uses[0]
        dtype = first.dtype
        for use in uses[1:]:
            dtype = torch.promote_types(dtype, use.dtype)
        self._uses = tuple(uses)
        super().__init__(first.batch_size, first.shape, first.scale, dtype, first.device)

    def outlive_update(self) -> None:
        for operator in self._uses:
            operator.outlive_update()

    def _workspace(self) -> int:
        return self._rows * self._columns + max(use._workspace() for use in self._uses)

    def _block(self, samples: slice, rows: slice) -> Tensor:
        block = self._uses[0]._block(samples, rows).to(self.dtype)
        for use in self._uses[1:]:
            block = block + use._block(samples, rows)
        return block

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
    """The one use, or the sum of several."""
    return uses[0] if len(uses) == 1 else Summed(uses)
