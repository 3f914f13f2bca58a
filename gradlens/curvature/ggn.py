"""Products with the generalized Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from gradlens.curvature.differentiation import (
    depends_on,
    derivative,
    differentiable_gradient,
)
from gradlens.curvature.hessian import check_loss
from gradlens.curvature.operator import CurvatureOperator
from gradlens.numerics.unavailable import UnavailableError


@final
class GGNOperator(CurvatureOperator):
    """The generalized Gauss-Newton matrix Jᵀ(∇²ℓ)J ``[D, D]``, times ``scale``.

    J is the Jacobian of the network's ``outputs``, of any shape, ∇²ℓ the loss's Hessian with
    respect to them (Schraudolph, 2002, Sec. 3). Both graphs must be alive. Terms of the loss that
    don't depend on the outputs, such as a regulariser, don't enter.

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
        _check_outputs(loss, outputs)
        self.outputs = outputs
        self._loss_gradient = differentiable_gradient(loss, [outputs])

    def jacobian_product(self, vectors: list[Tensor]) -> Tensor:
        """Jv, of the outputs' shape; v is one tensor for each parameter, of its shape."""
        cotangent, pulled_back = self._transposed
        (pushed_forward,) = derivative(pulled_back, [cotangent], vectors)
        return pushed_forward

    @cached_property
    def _transposed(self) -> tuple[Tensor, list[Tensor | None]]:
        """u and Jᵀu, linear in u, with respect to which its derivative times v is Jv."""
        cotangent = torch.zeros_like(self.outputs, requires_grad=True)
        parameters = list(self.parameters.values())
        return cotangent, differentiable_gradient(self.outputs, parameters, cotangent)

    def loss_hessian_product(self, direction: Tensor) -> Tensor:
        """(∇²ℓ)u without the ``scale``; u and the result are of the outputs' shape."""
        (curved,) = derivative(self._loss_gradient, [self.outputs], [direction])
        return curved

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        curved = self.loss_hessian_product(self.jacobian_product(vectors))
        return derivative([self.outputs], list(self.parameters.values()), [curved])


def _check_outputs(loss: Tensor, outputs: Tensor) -> None:
    if not outputs.requires_grad:
        raise UnavailableError("the outputs have no graph: compute them with gradients enabled")
    if not depends_on(loss, outputs):
        raise UnavailableError(
            "the loss doesn't depend on the outputs: pass the tensor that it is given"
        )
