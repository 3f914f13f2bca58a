"""Products with a Monte-Carlo estimate of the Fisher information matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.empirical_fisher import second_moment_product
from gradlens.curvature.ggn import LINEAR_IN_OUTPUTS, GGNOperator
from gradlens.curvature.jacobian import JacobianOperator
from gradlens.curvature.loss_over_data import BatchLoss, LossFunction, LossOverData
from gradlens.curvature.network_over_data import Split, as_pair
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.output_draws import drawing
from gradlens.curvature.probes import Seed
from gradlens.curvature.sum_over_data import SumOverData
from gradlens.graph.loss import LossReduction
from gradlens.numerics.unavailable import UnavailableError


@final
class FisherOperator(CurvatureOperator):
    """A Monte-Carlo Fisher matrix (1/M)·Σₙₘ JₙᵀsₙₘsₙₘᵀJₙ ``[D, D]``, divided by N for a mean loss.

    sₙₘ are M = ``draws`` random vectors at each sample's outputs, with E[sₙₘsₙₘᵀ] = ∇²ℓₙ. Of a loss
    that is the negative log-likelihood of an exponential family, such as cross-entropy and squared
    errors, that is the covariance of the gradients with labels drawn from the model's distribution
    (Kunstner et al., 2019, Sec. 2). So the matrix's mean is the Fisher matrix, which is then the
    generalised Gauss-Newton matrix. The draws are roots of ∇²ℓₙ times random signs. They depend on
    ``seed`` alone, and stay the same for all products. ``scale`` multiplies the matrix.

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
        super().__init__(parameters, scale)
        _check_draws(draws)
        ggn = GGNOperator(loss, outputs, parameters)
        if ggn.is_zero():
            raise UnavailableError(LINEAR_IN_OUTPUTS)
        draw = drawing(ggn, np.random.default_rng(seed))
        self._roots = torch.stack([draw() for _ in range(draws)]) / draws**0.5
        self._jacobian = JacobianOperator(outputs, parameters)

    @classmethod
    def over_data(
        cls,
        model: nn.Module,
        loss_function: LossFunction,
        data: Iterable[Any],
        *,
        draws: int = 1,
        seed: Seed = 0,
        parameters: Sequence[str] | None = None,
        loss_reduction: LossReduction = "mean",
        split: Split = as_pair,
    ) -> SumOverData:
        """The matrix of the loss over all of the data, as ``HessianOperator.over_data``.

        Each batch has draws of its own, which stay the same for all products.
        """
        _check_draws(draws)
        whole = LossOverData(model, loss_function, data, parameters, loss_reduction, split)
        first = int(np.random.default_rng(seed).integers(2**32))

        def of_batch(each: BatchLoss) -> FisherOperator:
            generator = np.random.default_rng([first, each.batch.index])
            return cls(each.loss, each.batch.output, whole.parameters, draws, generator)

        return SumOverData(whole, of_batch)

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        moment = second_moment_product(self._roots, self._jacobian.product(vectors))
        return self._jacobian.transposed_product(moment)


def _check_draws(draws: int) -> None:
    if draws < 1:
        raise ValueError(f"{draws} draws: take one at least")
