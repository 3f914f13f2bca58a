"""Per-sample gradients that are small enough to be stored."""

from __future__ import annotations

from torch import Tensor

from gradlens.numerics.norms import dots, products_of_pairs, squared_row_norms
from gradlens.numerics.precision import accumulable
from gradlens.per_sample.operators.operator import (
    GradientOperator,
)


class Dense(GradientOperator):
    """gₙ as a tensor ``[N, *P]``; for biases and normalisation weights, where it is small."""

    def __init__(self, gradients: Tensor, scale: float = 1.0) -> None:
        gradients = accumulable(gradients)
        shape = gradients.shape[1:]
        super().__init__(len(gradients), shape, scale, gradients.dtype, gradients.device)
        self._gradients = gradients.reshape(len(gradients), self._rows, self._columns)

    @property
    def elementwise(self) -> bool:
        return False

    def _block(self, samples: slice, rows: slice) -> Tensor:
        return self._gradients[samples, rows]

    def _squared_norms(self) -> Tensor:
        return squared_row_norms(self._gradients.flatten(1))

    def _gram(self) -> Tensor:
        return products_of_pairs(self._gradients.flatten(1))

    def _dot(self, matrix: Tensor) -> Tensor:
        return dots(self._gradients.flatten(1), matrix.flatten())

    def _sum(self) -> Tensor:
        return self._gradients.sum(0)
