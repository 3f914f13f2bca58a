"""A curvature matrix of a data set, which is the weighted sum of its batches' matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias, final

import torch
from torch import Tensor

from gradlens.curvature.flat_vectors import placed
from gradlens.curvature.loss_over_data import BatchLoss, LossOverData
from gradlens.curvature.operator import CurvatureOperator

OfBatch: TypeAlias = Callable[[BatchLoss], CurvatureOperator]
"""Makes the matrix of one batch's loss."""


@final
class SumOverData(CurvatureOperator):
    """Σᵢ wᵢ Mᵢ ``[D, D]`` over the batches, with each batch's weight in the loss of all samples.

    Each product takes a pass through the data, and so do several products together. The matrix is
    that of the parameters' values and the model's mode at the time of the product. ``parameters``
    are by default those of ``loss``.
    """

    joint: ClassVar[bool] = True

    def __init__(
        self,
        loss: LossOverData,
        of_batch: OfBatch,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(loss.parameters if parameters is None else parameters, 1.0)
        self.loss = loss
        self._of_batch = of_batch

    def products(self, many: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """The products with several vectors, in one pass through the data."""
        directions = [placed(vectors, self.parameters) for vectors in many]
        totals = [[torch.zeros_like(v, dtype=self.torch_dtype) for v in one] for one in directions]

        def add(batch: BatchLoss) -> None:
            found = self._of_batch(batch).products(directions)
            for total, parts in zip(totals, found, strict=True):
                for each, part in zip(total, parts, strict=True):
                    each.add_(part, alpha=batch.weight)

        self.loss.each(add)
        return totals

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        return self.products([vectors])[0]
