"""Products with the Hessian of a loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from gradlens.curvature.differentiation import derivative, differentiable_gradient
from gradlens.curvature.loss_over_data import LossFunction, LossOverData
from gradlens.curvature.network_over_data import Split, as_pair
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.sum_over_data import SumOverData
from gradlens.graph.loss import LossReduction


@final
class HessianOperator(CurvatureOperator):
    """The Hessian ``[D, D]`` of a scalar loss, times ``scale``.

    The loss's graph must be alive. Its gradient is built once; each product costs one backward
    pass through both (Pearlmutter, 1994, Eq. 6.1). Parameters that the loss doesn't depend on
    have zero rows and columns.

    Raises ``ValueError`` for a loss that is not a scalar or has no graph, and ``UnavailableError``,
    here or with the first product, where an operation can't be differentiated twice.
    """

    def __init__(self, loss: Tensor, parameters: Mapping[str, Tensor], scale: float = 1.0) -> None:
        super().__init__(parameters, scale)
        check_loss(loss)
        self._gradients = differentiable_gradient(loss, list(self.parameters.values()))

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
        """The Hessian of the loss over all of the data, which is an iterable of batches.

        Of a mean loss it is that of the mean over all samples, of a sum loss that of their sum.
        ``loss_function(outputs, targets)`` is called with ``model(inputs)``, and ``split`` makes
        inputs and targets of a batch that isn't such a pair. ``parameters`` are names of
        parameters, or of modules for all of theirs; by default, all that require a gradient.

        Raises ``ValueError`` for a model, a loss or data of which there is no such matrix.
        """
        whole = LossOverData(model, loss_function, data, parameters, loss_reduction, split)
        return SumOverData(whole, lambda each: cls(each.loss, whole.parameters))

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        return derivative(self._gradients, list(self.parameters.values()), vectors)


def check_loss(loss: Tensor) -> None:
    """Raises ``ValueError`` for a loss that can't be differentiated."""
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {list(loss.shape)}: pass a scalar")
    if not loss.requires_grad:
        raise ValueError("the loss has no graph: compute it with gradients enabled")
