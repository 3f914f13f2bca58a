"""Products with the Hessian of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor

from gradlens.curvature.differentiation import derivative, differentiable_gradient
from gradlens.curvature.loss_over_data import LossOverData
from gradlens.curvature.sum_over_data import LossOperator, OfBatch


@final
class HessianOperator(LossOperator):
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
    def _of_batches(cls, whole: LossOverData) -> OfBatch:
        return lambda each: cls(each.loss, whole.parameters)

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        return derivative(self._gradients, list(self.parameters.values()), vectors)


def check_loss(loss: Tensor) -> None:
    """Raises ``ValueError`` for a loss that can't be differentiated."""
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {list(loss.shape)}: pass a scalar")
    if not loss.requires_grad:
        raise ValueError("the loss has no graph: compute it with gradients enabled")
