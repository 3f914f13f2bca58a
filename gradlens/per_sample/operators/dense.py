"""Per-sample gradients that are small enough to be stored."""

from __future__ import annotations

import torch
from torch import Tensor

from gradlens.numerics.norms import dots, row_norms
from gradlens.numerics.precision import accumulable, double, is_small
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

    def _centred_gram(self) -> Tensor:
        if not is_small(self._gradients):
            return super()._centred_gram()
        mean, apart = self._mean_and_apart()
        return self._keep_centred_gram(apart @ apart.T, apart @ mean)

    def _element_deviations(self) -> tuple[Tensor, Tensor]:
        if not is_small(self._gradients):
            return super()._element_deviations()
        mean, apart = self._mean_and_apart()
        shape = self._rows, self._columns
        return mean.to(self.dtype).view(shape), apart.square_().sum(0).view(shape)

    def _mean_and_apart(self) -> tuple[Tensor, Tensor]:
        """ḡ ``[R·K]`` and gₙ − ḡ ``[N, R·K]`` in float64, in new tensors."""
        rows = double(self._gradients.flatten(1))
        mean = rows.sum(0).div_(max(self.batch_size, 1))
        return mean, rows.sub_(mean)

    def _dot_in_range(self, matrix: Tensor) -> Tensor:
        if not is_small(self._gradients):
            return super()._dot_in_range(matrix)
        return double(self._gradients.flatten(1)) @ double(matrix.flatten())

    def _dot(self, matrix: Tensor) -> Tensor:
        return dots(self._gradients.flatten(1), matrix.flatten())

    def _sum(self) -> Tensor:
        return self._gradients.sum(0)
