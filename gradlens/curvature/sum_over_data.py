"""Curvature matrices of a loss, and of a data set: the weighted sum of its batches' matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, final

import torch
from torch import Tensor, nn

from gradlens.curvature.flat_vectors import placed
from gradlens.curvature.loss_over_data import BatchLoss, LossFunction, LossOverData
from gradlens.curvature.network_over_data import Split, as_pair
from gradlens.curvature.operator import CurvatureOperator
from gradlens.graph.loss import LossReduction

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


class LossOperator(CurvatureOperator, ABC):
    """The matrix of one loss, of which there is one over data, too."""

    @classmethod
    def over_data(
        cls,
        model: nn.Module,
        loss_function: LossFunction,
        data: Iterable[Any],
        *,
        parameters: Sequence[str] | None = None,
        loss_reduction: LossReduction = "mean",
        split: Split = as_pair,
    ) -> SumOverData:
        """The matrix of the loss over all of the data, which is an iterable of batches.

        Of a mean loss it is that of the mean over all samples, of a sum loss that of their sum.
        ``loss_function(outputs, targets)`` is called with ``model(inputs)``, and ``split`` makes
        inputs and targets of a batch that isn't such a pair. ``parameters`` are names of
        parameters, or of modules for all of theirs; by default, all that require a gradient. For
        all matrices but the Hessian, the model must return one tensor.

        Raises ``ValueError`` for a model, a loss or data of which there is no such matrix.
        """
        whole = LossOverData(model, loss_function, data, parameters, loss_reduction, split)
        return SumOverData(whole, cls._of_batches(whole))

    @classmethod
    @abstractmethod
    def _of_batches(cls, whole: LossOverData) -> OfBatch:
        """What makes the matrix of each batch's loss."""
