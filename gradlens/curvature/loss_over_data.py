"""The loss over all samples of a data set, which is summed up batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from gradlens.curvature.differentiation import derivative
from gradlens.curvature.network_over_data import BatchOutputs, NetworkOverData, Split, as_pair
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
class BatchLoss:
    """One batch's loss, with its graph, and what ``weight`` it has in the loss of all batches."""

    batch: BatchOutputs
    loss: Tensor
    weight: float


@final
class LossOverData:
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
        self._network = NetworkOverData(model, data, parameters, split, self._check)
        self.parameters = self._network.parameters
        self.samples = self._network.samples
        self.batches = self._network.batches

    def each(self, function: Callable[[BatchLoss], None]) -> None:
        """Call the function with each batch's loss, of which none is kept."""

        def of_loss(batch: BatchOutputs) -> None:
            weight = batch.samples / self.samples if self.loss_reduction == "mean" else 1.0
            function(BatchLoss(batch, self._loss(batch), weight))

        self._network.each(of_loss)

    def mean(self) -> float:
        """The mean loss of all samples, at the parameters' present values."""
        divisor = self.samples if self.loss_reduction == "sum" else 1
        total = 0.0

        def add(batch: BatchLoss) -> None:
            nonlocal total
            total += float(batch.loss.detach()) * batch.weight / divisor

        self.each(add)
        return total

    def mean_gradient(self) -> list[Tensor]:
        """The gradient of the mean loss, one tensor for each parameter."""
        parameters = list(self.parameters.values())
        totals = [torch.zeros_like(p, requires_grad=False) for p in parameters]
        divisor = self.samples if self.loss_reduction == "sum" else 1

        def add(batch: BatchLoss) -> None:
            found = derivative([batch.loss], parameters, [torch.ones_like(batch.loss)])
            for total, part in zip(totals, found, strict=True):
                total.add_(part, alpha=batch.weight / divisor)

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
