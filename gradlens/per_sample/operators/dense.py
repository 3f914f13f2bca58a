"""Per-sample gradients that are small enough to be stored."""

from __future__ import annotations

import torch
from torch import Tensor

from gradlens.numerics.norms import dots, row_norms
from gradlens.numerics.precision import accumulable, double
from gradlens.per_sample.operators.operator import (
    GradientOperator,
)


class Dense(GradientOperator):
    """gₙ as a tensor ``[N, *P]``; for biases and normalisation weights, where it is small."""

    def __init__(self, gradients: Tensor, scale: float = 1.0, eps: float | None = None) -> None:
        eps = torch.finfo(gradients.dtype).eps if eps is None else eps
        gradients = accumulable(gradients)
        shape = gradients.shape[1:]
        super().__init__(len(gradients), shape, scale, gradients.dtype, gradients.device, eps)
        self._gradients = gradients.reshape(len(gradients), self._rows, self._columns)

    @property
    def elementwise(self) -> bool:
        return False

    def _block(self, samples: slice, rows: slice) -> Tensor:
        return self._gradients[samples, rows]

    def _keep_only(self, samples: Tensor) -> None:
        self._gradients = self._gradients[samples]

    def _squared_norms(self) -> Tensor:
        return double(row_norms(self._gradients.flatten(1))).square()

    def _dot(self, matrix: Tensor) -> Tensor:
        return dots(self._gradients.flatten(1), matrix.flatten())

    def _sum(self) -> Tensor:
        return self._gradients.sum(0)
