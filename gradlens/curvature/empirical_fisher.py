"""Products with the second moment of per-sample gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from gradlens.curvature.differentiation import derivative
from gradlens.curvature.ggn import check_outputs
from gradlens.curvature.hessian import check_loss
from gradlens.curvature.jacobian import JacobianOperator
from gradlens.curvature.loss_over_data import LossFunction, LossOverData
from gradlens.curvature.network_over_data import Split, as_pair
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.sum_over_data import SumOverData
from gradlens.gradients.per_sample_gradients import check_loss_reduction
from gradlens.graph.loss import LossReduction
from gradlens.numerics.unavailable import UnavailableError


@final
class EmpiricalFisherOperator(CurvatureOperator):
    """The empirical Fisher matrix (1/N)·Σₙ gₙgₙᵀ ``[D, D]`` of a mean loss, Σₙ gₙgₙᵀ of a sum loss.

    gₙ = Jₙᵀ∇ℓₙ is sample n's gradient, with the labels of the data (Kunstner et al., 2019, Eq. 3).
    The first axis of the ``outputs`` must be that of samples, and the loss the mean or the sum of
    functions of each sample's outputs, as ``loss_reduction`` says. Both graphs must be alive.
    ``scale`` multiplies the matrix.

    Raises ``ValueError`` for a loss that is not a scalar or has no graph, and ``UnavailableError``
    for outputs that have no graph or no samples, or that it doesn't depend on.
    """

    def __init__(
        self,
        loss: Tensor,
        outputs: Tensor,
        parameters: Mapping[str, Tensor],
        loss_reduction: LossReduction = "mean",
        scale: float = 1.0,
    ) -> None:
        super().__init__(parameters, scale)
        gradients = sample_gradients(loss, outputs, loss_reduction)
        divisor = len(outputs) if loss_reduction == "mean" else 1
        self._roots = gradients[None] / divisor**0.5
        self._jacobian = JacobianOperator(outputs, parameters)

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
        """The matrix of the loss over all of the data, as ``HessianOperator.over_data``."""
        whole = LossOverData(model, loss_function, data, parameters, loss_reduction, split)
        return SumOverData(
            whole,
            lambda each: cls(each.loss, each.batch.output, whole.parameters, loss_reduction),
        )

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        moment = second_moment_product(self._roots, self._jacobian.product(vectors))
        return self._jacobian.transposed_product(moment)


def sample_gradients(loss: Tensor, outputs: Tensor, loss_reduction: LossReduction) -> Tensor:
    """∇ℓₙ at each sample's outputs, of the outputs' shape; raises as the operators do."""
    check_loss_reduction(loss_reduction)
    check_loss(loss)
    check_outputs(loss, outputs)
    if outputs.dim() == 0 or outputs.numel() == 0:
        raise UnavailableError(f"outputs of shape {list(outputs.shape)} have no samples")
    (gradient,) = derivative([loss], [outputs], [torch.ones_like(loss)])
    return gradient * len(outputs) if loss_reduction == "mean" else gradient


def second_moment_product(roots: Tensor, direction: Tensor) -> Tensor:
    """Σₘ sₙₘ(sₙₘᵀuₙ) ``[N, *C]`` of sₙₘ in ``roots`` ``[M, N, *C]`` and uₙ ``[N, *C]``."""
    return (roots * sample_products(roots, direction)).sum(0)


def sample_products(roots: Tensor, direction: Tensor) -> Tensor:
    """sₙₘᵀuₙ ``[M, N, 1, ...]``, of as many axes as ``roots`` ``[M, N, *C]``."""
    products = (roots * direction).reshape(*roots.shape[:2], -1).sum(2)
    return products.reshape(*roots.shape[:2], *[1] * (roots.dim() - 2))
