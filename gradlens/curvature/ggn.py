"""Products with the generalized Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.differentiation import depends_on, derivative, differentiable_gradient
from gradlens.curvature.hessian import check_loss
from gradlens.curvature.jacobian import JacobianOperator
from gradlens.curvature.loss_over_data import BatchLoss, LossOverData
from gradlens.curvature.sum_over_data import LossOperator, OfBatch
from gradlens.numerics.unavailable import UnavailableError

LINEAR_IN_OUTPUTS = (
    "the loss is linear in what the model returned, such as log-probabilities, so that the "
    "generalised Gauss-Newton matrix is zero: pass a model that returns the logits, and the loss "
    "that is computed from these"
)


@final
class GGNOperator(LossOperator):
    """The generalized Gauss-Newton matrix Jᵀ(∇²ℓ)J ``[D, D]``, times ``scale``.

    J is the Jacobian of the network's ``outputs``, of any shape, ∇²ℓ the loss's Hessian with
    respect to them (Schraudolph, 2002, Sec. 3). Both graphs must be alive. Terms of the loss that
    don't depend on the outputs, such as a regulariser, don't enter. Over data, products raise
    ``UnavailableError`` where the loss is linear in the outputs, so that the matrix is zero.

    Raises ``ValueError`` for a loss that is not a scalar or has no graph, and ``UnavailableError``
    for outputs that have no graph or that it doesn't depend on, and, here or with the first
    product, where an operation can't be differentiated twice.
    """

    def __init__(
        self,
        loss: Tensor,
        outputs: Tensor,
        parameters: Mapping[str, Tensor],
        scale: float = 1.0,
    ) -> None:
        super().__init__(parameters, scale)
        check_loss(loss)
        check_outputs(loss, outputs)
        self.outputs = outputs
        self.jacobian = JacobianOperator(outputs, parameters)
        self._loss_gradient = differentiable_gradient(loss, [outputs])

    @classmethod
    def _of_batches(cls, whole: LossOverData) -> OfBatch:
        def of_batch(each: BatchLoss) -> GGNOperator:
            operator = cls(each.loss, each.batch.output, whole.parameters)
            if each.batch.index == 0 and operator.is_zero():
                raise UnavailableError(LINEAR_IN_OUTPUTS)
            return operator

        return of_batch

    @property
    def loss_gradient(self) -> Tensor:
        """∇ℓ at the outputs, of their shape, without the ``scale``.

        Raises ``UnavailableError`` for a loss that is linear in them.
        """
        (gradient,) = self._loss_gradient
        if gradient is None:
            raise UnavailableError(LINEAR_IN_OUTPUTS)
        return gradient.detach()

    def loss_hessian_product(self, direction: Tensor) -> Tensor:
        """(∇²ℓ)u without the ``scale``; u and the result are of the outputs' shape."""
        (curved,) = derivative(self._loss_gradient, [self.outputs], [direction])
        return curved

    def is_zero(self, seed: int = 0) -> bool:
        """Whether the loss is linear in the outputs, by a product with a random vector."""
        drawn = np.random.default_rng(seed).standard_normal(tuple(self.outputs.shape))
        return not bool(self.loss_hessian_product(torch.from_numpy(drawn).to(self.outputs)).any())

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        curved = self.loss_hessian_product(self.jacobian.product(vectors))
        return self.jacobian.transposed_product(curved)


def check_outputs(loss: Tensor, outputs: Tensor) -> None:
    if not outputs.requires_grad:
        raise UnavailableError("the outputs have no graph: compute them with gradients enabled")
    if not depends_on(loss, outputs):
        raise UnavailableError(
            "the loss doesn't depend on the outputs: pass the tensor that it is given"
        )
