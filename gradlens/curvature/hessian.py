"""Products with the Hessian of a loss, and with its generalised Gauss-Newton part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np
from torch import Tensor

from gradlens.curvature.differentiation import derivative, differentiable_gradient
from gradlens.curvature.jacobian import JacobianOperator
from gradlens.curvature.loss_over_data import BatchLoss, LossOperator, LossOverData, OfBatch
from gradlens.curvature.operator import normal_like
from gradlens.graph.graph import Graph
from gradlens.numerics.unavailable import UnavailableError

LINEAR_IN_OUTPUTS = (
    "the loss is linear in what the model returned, such as log-probabilities, so that the "
    "generalised Gauss-Newton matrix is zero: pass a model that returns the logits, and the loss "
    "that is computed from these"
)


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


@final
class GGNOperator(LossOperator):
    """The generalised Gauss-Newton matrix Jᵀ(∇²ℓ)J ``[D, D]``, times ``scale``.

    J is the Jacobian of the network's ``outputs``, of any shape, ∇²ℓ the loss's Hessian with
    respect to them (Schraudolph, 2002, Sec. 3). Both graphs must be alive. Terms of the loss that
    don't depend on the outputs, such as a regulariser, don't enter. Over data, products raise
    ``UnavailableError`` where the loss is linear in the outputs, so that the matrix is zero.

    Raises ``ValueError`` for a loss that is not a scalar or has no graph, and ``UnavailableError``
    for outputs that have no graph or that it doesn't depend on, and, here or with the first
    product, where an operation can't be differentiated twice.
    """

    def __init__(
        self, loss: Tensor, outputs: Tensor, parameters: Mapping[str, Tensor], scale: float = 1.0
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
            operator = cls(each.loss, each.output, whole.parameters)
            if each.index == 0 and operator.is_zero():
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
        vector = normal_like(self.outputs, np.random.default_rng(seed))
        return not bool(self.loss_hessian_product(vector).any())

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        curved = self.loss_hessian_product(self.jacobian.product(vectors))
        return self.jacobian.transposed_product(curved)


def check_loss(loss: Tensor) -> None:
    """Raises ``ValueError`` for a loss that can't be differentiated."""
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {list(loss.shape)}: pass a scalar")
    if not loss.requires_grad:
        raise ValueError("the loss has no graph: compute it with gradients enabled")


def check_outputs(loss: Tensor, outputs: Tensor) -> None:
    """Raises ``UnavailableError`` for outputs at which the loss can't be split."""
    if not outputs.requires_grad:
        raise UnavailableError("the outputs have no graph: compute them with gradients enabled")
    if loss.grad_fn is None or Graph(loss).number_of(outputs) < 0:
        raise UnavailableError(
            "the loss doesn't depend on the outputs: pass the tensor that it is given"
        )


def check_rows(outputs: Tensor) -> None:
    """Raises ``UnavailableError`` for outputs without an axis of samples, or without samples."""
    if outputs.dim() == 0 or outputs.numel() == 0:
        raise UnavailableError(f"outputs of shape {list(outputs.shape)} have no samples")
