"""Samples that have several rows each, one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from gradlens.per_sample.operators.operator import GradientOperator


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

    def _keep_only(self, samples: Tensor) -> None:
        offsets = torch.arange(self._size, device=samples.device)
        self._by_row = self._by_row.some((samples[:, None] * self._size + offsets).flatten())

    def _dot(self, matrix: Tensor) -> Tensor:
        return self._by_row._dot(matrix).unflatten(0, (-1, self._size)).sum(1)

    def _sum(self) -> Tensor:
        return self._by_row._sum()

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        return self._by_row._weighted_sum(weights.repeat_interleave(self._size))
