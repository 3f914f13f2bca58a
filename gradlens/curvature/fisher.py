"""Products with second moments of random or per-sample gradients: the Fisher matrices.

All are JᵀMJ with the Jacobian J of a network's outputs, and with a matrix M for each sample that is
a sum of products of vectors at its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.differentiation import derivative
from gradlens.curvature.factors import drawing
from gradlens.curvature.hessian import (
    LINEAR_IN_OUTPUTS,
    GGNOperator,
    JacobianOperator,
    check_rows,
    split_at,
)
from gradlens.curvature.operator import Seed
from gradlens.curvature.over_data import BatchLoss, LossOperator, LossOverData, OfBatch
from gradlens.gradients.per_sample_gradients import check_loss_reduction
from gradlens.graph.loss import LossReduction
from gradlens.numerics.unavailable import UnavailableError


class _SecondMoment(LossOperator):
    """Σₙₘ (JₙᵀsₙₘsₙₘᵀJₙ) with ``roots`` sₙₘ ``[M, N, *C]`` at the ``outputs`` ``[N, *C]``.

    With a ``centre`` c, one tensor for each parameter, it is Σₙₘ (Jₙᵀsₙₘ − c)(Jₙᵀsₙₘ − c)ᵀ.
    """

    def __init__(
        self,
        roots: Tensor,
        outputs: Tensor,
        parameters: Mapping[str, Tensor],
        scale: float,
        centre: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(parameters, scale)
        self._roots = roots
        self._jacobian = JacobianOperator(outputs, parameters)
        self._centre = centre

    @final
    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        samples = self._roots.shape[:2]
        along = (self._roots * self._jacobian.product(vectors)).reshape(*samples, -1).sum(2)
        if self._centre:
            along -= sum((c * v).sum() for c, v in zip(self._centre, vectors, strict=True))
        weights = along.reshape(*samples, *[1] * (self._roots.dim() - 2))
        found = self._jacobian.transposed_product((self._roots * weights).sum(0))
        if not self._centre:
            return found
        return [part - along.sum() * c for part, c in zip(found, self._centre, strict=True)]


@final
class FisherOperator(_SecondMoment):
    """A Monte-Carlo Fisher matrix (1/M)·Σₙₘ JₙᵀsₙₘsₙₘᵀJₙ ``[D, D]``, divided by N for a mean loss.

    sₙₘ are M = ``draws`` random vectors at each sample's outputs, with E[sₙₘsₙₘᵀ] = ∇²ℓₙ. Of a loss
    that is the negative log-likelihood of an exponential family, such as cross-entropy and squared
    errors, that is the covariance of the gradients with labels drawn from the model's distribution
    (Kunstner et al., 2019, Sec. 2). So the matrix's mean is the Fisher matrix, which is then the
    generalised Gauss-Newton matrix. The draws are roots of ∇²ℓₙ times random signs. They depend on
    ``seed`` alone, and stay the same for all products; over data, each batch has draws of its own.
    ``scale`` multiplies the matrix.

    The first axis of the ``outputs`` must be that of samples. Raises ``ValueError`` for fewer than
    one draw, and otherwise as ``GGNOperator`` does; ``UnavailableError`` for a loss that is linear
    in the outputs, isn't a sum over samples or isn't convex, and for more than 256 outputs of each
    sample unless it is a squared error, a cross-entropy or a sum over single outputs.
    """

    def __init__(
        self,
        loss: Tensor,
        outputs: Tensor,
        parameters: Mapping[str, Tensor],
        draws: int = 1,
        seed: Seed = 0,
        scale: float = 1.0,
    ) -> None:
        _check_draws(draws)
        ggn = GGNOperator(loss, outputs, parameters)
        if ggn.is_zero():
            raise UnavailableError(LINEAR_IN_OUTPUTS)
        draw = drawing(ggn, np.random.default_rng(seed))
        roots = torch.stack([draw() for _ in range(draws)]) / draws**0.5
        super().__init__(roots, outputs, parameters, scale)

    @classmethod
    def _of_batches(cls, whole: LossOverData, draws: int = 1, seed: Seed = 0) -> OfBatch:
        _check_draws(draws)
        first = int(np.random.default_rng(seed).integers(2**32))

        def of_batch(each: BatchLoss) -> FisherOperator:
            generator = np.random.default_rng([first, whole.batches_before + each.index])
            return cls(each.loss, each.output, whole.parameters, draws, generator)

        return of_batch


@final
class EmpiricalFisherOperator(_SecondMoment):
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
        gradients = _sample_gradients(loss, outputs, loss_reduction)
        divisor = len(outputs) if loss_reduction == "mean" else 1
        super().__init__(gradients[None] / divisor**0.5, outputs, parameters, scale)

    @classmethod
    def _of_batches(cls, whole: LossOverData) -> OfBatch:
        parameters, reduction = whole.parameters, whole.loss_reduction
        return lambda each: cls(each.loss, each.output, parameters, reduction)


@final
class GradCovarianceOperator(_SecondMoment):
    """The covariance matrix (1/N)·Σₙ (gₙ − ḡ)(gₙ − ḡ)ᵀ ``[D, D]`` of per-sample gradients.

    It is the second moment (1/N)·Σₙ gₙgₙᵀ less ḡḡᵀ, and the same for a mean loss as for a sum loss.
    The arguments are those of ``EmpiricalFisherOperator``. ``mean_gradient`` is ḡ, one tensor for
    each parameter; by default, that of these samples. It is another one where they are a part of
    those that the covariance is taken over. Over data it takes one pass, and is that of the
    parameters' values then: make a new operator when these have changed.

    ``scale`` multiplies the matrix. Raises as ``EmpiricalFisherOperator`` does.
    """

    def __init__(
        self,
        loss: Tensor,
        outputs: Tensor,
        parameters: Mapping[str, Tensor],
        loss_reduction: LossReduction = "mean",
        mean_gradient: Sequence[Tensor] | None = None,
        scale: float = 1.0,
    ) -> None:
        gradients, samples = _sample_gradients(loss, outputs, loss_reduction), len(outputs)
        if mean_gradient is None:
            jacobian = JacobianOperator(outputs, parameters)
            mean_gradient = jacobian.transposed_product(gradients / samples)
        centre = [part / samples**0.5 for part in mean_gradient]
        super().__init__(gradients[None] / samples**0.5, outputs, parameters, scale, centre)

    @classmethod
    def _of_batches(cls, whole: LossOverData) -> OfBatch:
        mean = whole.mean_gradient()

        def of_batch(each: BatchLoss) -> GradCovarianceOperator:
            # A covariance is a mean over samples, whatever the loss is.
            scale = each.samples / whole.samples / each.weight
            output, reduction = each.output, whole.loss_reduction
            return cls(each.loss, output, whole.parameters, reduction, mean, scale)

        return of_batch


def _sample_gradients(loss: Tensor, outputs: Tensor, loss_reduction: LossReduction) -> Tensor:
    """∇ℓₙ at each sample's outputs, of the outputs' shape; raises as the operators do."""
    check_loss_reduction(loss_reduction)
    split_at(loss, outputs)
    check_rows(outputs)
    (gradient,) = derivative([loss], [outputs], [torch.ones_like(loss)])
    return gradient * len(outputs) if loss_reduction == "mean" else gradient


def _check_draws(draws: int) -> None:
    if draws < 1:
        raise ValueError(f"{draws} draws: take one at least")
