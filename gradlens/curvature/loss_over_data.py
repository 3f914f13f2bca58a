"""The loss over all samples of a data set and its matrices, summed up batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

import torch
from torch import Tensor, nn

from gradlens.curvature.differentiation import derivative
from gradlens.curvature.network_over_data import BatchOutputs, NetworkOverData, Split, as_pair
from gradlens.curvature.operator import CurvatureOperator, placed
from gradlens.gradients.per_sample_gradients import check_loss_reduction
from gradlens.graph.loss import LossReduction
from gradlens.torch_private import torch_functions_on, tree_map_only

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""Makes a loss of the model's outputs and the targets, such as ``nn.CrossEntropyLoss()``."""

ROUNDING = 1000
"""Rounding errors that the losses of parts may differ by from that of the whole.

A trade-off: each loss is a sum over many terms in another order, and a weighted mean of almost
equal weights is almost a mean.
"""

NO_SCALAR = (
    "loss_function returned {kind} for batch {index}: it must return a scalar tensor, as with "
    "reduction='mean' or 'sum'"
)
NOT_ADDITIVE = (
    "the loss of batch {index} isn't the {reduction} over its samples: it is {whole:.6g}, and that "
    "of its two parts together is {parts:.6g}. {remedy}"
)
OTHER_REDUCTION = "It is their {other}: pass loss_reduction={other!r}"
NEITHER = (
    "A loss that couples the samples of a batch isn't defined for all of the data; for a mean with "
    "weights or without ignored targets, pass the loss with reduction='sum' and "
    "loss_reduction='sum', and divide by the sum of weights"
)
UNKNOWN_PARTS = (
    "loss_function can't be computed for a part of batch {index} ({error}), so that it isn't known "
    "to be a mean or a sum over samples: pass one that takes any number of samples"
)


@dataclass(frozen=True)
class BatchLoss(BatchOutputs):
    """One batch's loss, with its graph, and what ``weight`` it has in the loss of all batches."""

    loss: Tensor
    weight: float


@final
class LossOverData(NetworkOverData):
    """The mean or summed loss over all samples of the data.

    ``loss_function`` of each batch must be the mean or the sum over the batch's samples, as
    ``loss_reduction`` says. That is checked by computing it for two parts of each batch. Batches
    may be of different sizes: each counts by its number of samples.

    Raises ``ValueError`` for a loss that isn't such a mean or sum, and as ``NetworkOverData`` does.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        data: Iterable[Any],
        parameters: Sequence[str] | None = None,
        loss_reduction: LossReduction = "mean",
        split: Split = as_pair,
    ) -> None:
        check_loss_reduction(loss_reduction)
        self.loss_reduction: LossReduction = loss_reduction
        self._function = loss_function
        super().__init__(model, data, parameters, split, self._check)

    def each(self, function: Callable[[BatchLoss], None]) -> None:
        """Call the function with each batch's loss, of which none is kept."""

        def of_loss(batch: BatchOutputs) -> None:
            weight = batch.samples / self.samples if self.loss_reduction == "mean" else 1.0
            function(BatchLoss(**vars(batch), loss=self._loss(batch), weight=weight))

        self.each_outputs(of_loss)

    @property
    def divisor(self) -> int:
        """The loss over the mean loss of all samples: N of a summed loss, and otherwise 1."""
        return self.samples if self.loss_reduction == "sum" else 1

    def mean(self) -> float:
        """The mean loss of all samples, at the parameters' present values."""
        parts: list[float] = []
        self.each(lambda batch: parts.append(float(batch.loss.detach()) * batch.weight))
        return sum(parts) / self.divisor

    def mean_gradient(self) -> list[Tensor]:
        """The gradient of the mean loss, one tensor for each parameter."""
        parameters = list(self.parameters.values())
        totals = [torch.zeros_like(p, requires_grad=False) for p in parameters]

        def add(batch: BatchLoss) -> None:
            found = derivative([batch.loss], parameters, [torch.ones_like(batch.loss)])
            for total, part in zip(totals, found, strict=True):
                total.add_(part, alpha=batch.weight / self.divisor)

        self.each(add)
        return totals

    def _loss(self, batch: BatchOutputs) -> Tensor:
        with torch_functions_on():
            loss = self._function(batch.outputs, batch.targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(NO_SCALAR.format(kind=kind, index=batch.index))
        return loss

    @torch.no_grad()
    def _check(self, batch: BatchOutputs) -> None:
        """Compare the batch's loss with those of a third of its samples and of the rest."""
        whole = self._loss(batch)
        if batch.samples == 1:
            return
        first = max(1, batch.samples // 3)
        try:
            losses = [
                float(self._function(*_rows((batch.outputs, batch.targets), part)))
                for part in (slice(None, first), slice(first, None))
            ]
        except (RuntimeError, ValueError, IndexError) as error:
            reason = UNKNOWN_PARTS.format(index=batch.index, error=error)
            raise ValueError(reason) from error
        share = first / batch.samples
        combined = {"mean": share * losses[0] + (1 - share) * losses[1], "sum": sum(losses)}
        tolerance = ROUNDING * torch.finfo(whole.dtype).eps * max(map(abs, losses))
        agree = {name: not abs(float(whole) - one) > tolerance for name, one in combined.items()}
        if agree[self.loss_reduction]:
            return
        others = [name for name, agrees in agree.items() if agrees]
        raise ValueError(
            NOT_ADDITIVE.format(
                index=batch.index,
                reduction=self.loss_reduction,
                whole=float(whole),
                parts=combined[self.loss_reduction],
                remedy=OTHER_REDUCTION.format(other=others[0]) if others else NEITHER,
            )
        )


def _rows(tree: Any, part: slice) -> Any:
    """The samples of a part, of all tensors that have an axis of samples."""
    return tree_map_only(Tensor, lambda each: each[part] if each.dim() else each, tree)


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
        self, loss: LossOverData, of_batch: OfBatch, parameters: Mapping[str, Tensor] | None = None
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
        **options: Any,
    ) -> SumOverData:
        """The matrix of the loss over all of the data, which is an iterable of batches.

        Of a mean loss it is that of the mean over all samples, of a sum loss that of their sum.
        ``loss_function(outputs, targets)`` is called with ``model(inputs)``, and ``split`` makes
        inputs and targets of a batch that isn't such a pair. ``parameters`` are names of
        parameters, or of modules for all of theirs; by default, all that require a gradient.
        ``options`` are further ones of the matrix: ``draws`` and ``seed`` of ``FisherOperator``.
        For all matrices but the Hessian, the model must return one tensor.

        Raises ``ValueError`` for a model, a loss or data of which there is no such matrix.
        """
        whole = LossOverData(model, loss_function, data, parameters, loss_reduction, split)
        return SumOverData(whole, cls._of_batches(whole, **options))

    @classmethod
    @abstractmethod
    def _of_batches(cls, whole: LossOverData, *args: Any, **options: Any) -> OfBatch:
        """What makes the matrix of each batch's loss."""
