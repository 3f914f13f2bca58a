"""First and second derivatives of each sample's loss along directions in parameter space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradlens.curvature.hessian import GGNOperator, check_rows
from gradlens.curvature.operator import placed, shaped
from gradlens.curvature.products import normal_like
from gradlens.curvature.samples_jacobians import SamplesJacobians
from gradlens.numerics.formulas import signal_to_noise
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.plan import Plans

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DirectionalDerivatives:
    """Derivatives of each sample's loss ℓₙ along k unit vectors e, ``[N, k]``.

    ``first`` are gₙᵀe, and ``second`` eᵀJₙᵀHₙJₙe, those of sample n's part of the generalised
    Gauss-Newton matrix: γₙₖ and λₙₖ of Dangel et al., 2022 (arXiv:2106.02624). Their means over the
    samples are the derivatives of the mean loss.
    """

    first: Floats
    second: Floats

    @property
    def gradient_snr(self) -> list[float]:
        """Signal-to-noise ratio of the mini-batch's first derivative along each e, k numbers.

        The mean's square over the mean's variance, γ̄²/(s²/N) with the sample variance s² over N−1.
        That is N times the ratio of a single sample, which is the one of Dangel et al. If the mean
        of all possible samples is zero, it is 1 on average over mini-batches, and only one of
        twenty is above 4. NaN with its reason for a single sample.
        """
        return signal_to_noise(self.first)

    @property
    def curvature_snr(self) -> list[float]:
        """The same of the second derivative."""
        return signal_to_noise(self.second)


def directional_derivatives(
    ggn: GGNOperator,
    directions: NDArray[Any],
    model: nn.Module | None = None,
    plans: Plans | None = None,
) -> DirectionalDerivatives:
    """The derivatives along the columns of ``directions`` ``[D, k]``, by products of the Jacobian.

    The rows of the network's outputs are the samples. Each direction takes two backward passes.
    Pass the ``model`` if modules of it have hooks, which then don't run.

    Raises ``UnavailableError`` where samples are coupled, as by ``BatchNorm`` in train mode or by a
    loss that is not a sum over samples; where it isn't known whether they are, since a parameter
    has no per-sample gradients; and where an operation can't be differentiated twice.
    """
    _check_sum_over_samples(ggn)
    SamplesJacobians(ggn, model, plans)  # refuses coupled samples
    factor = len(ggn.outputs) * ggn.scale
    gradient = ggn.loss_gradient
    first, second = [], []
    for direction in torch.tensor(directions.T):
        along = ggn.jacobian.product(placed(shaped(direction, ggn.parameters), ggn.parameters))
        curved = ggn.loss_hessian_product(along)
        first.append(_by_sample(gradient, along) * factor)
        second.append(_by_sample(curved, along) * factor)
    return DirectionalDerivatives(np.stack(first, axis=1), np.stack(second, axis=1))


def _by_sample(one: Tensor, other: Tensor) -> Floats:
    """Inner products of each sample's rows, ``[N]``."""
    products = one.cpu().double().flatten(1) * other.cpu().double().flatten(1)
    found: Floats = products.sum(1).numpy()
    return found


def _check_sum_over_samples(ggn: GGNOperator) -> None:
    """Refuse a loss whose Hessian has entries for two samples together.

    By the product with a random vector of every other sample, which misses that with probability
    zero.
    """
    outputs = ggn.outputs
    check_rows(outputs)
    probe = normal_like(outputs, np.random.default_rng(0))
    for kept in (0, 1):
        some = probe.clone()
        some[1 - kept :: 2] = 0
        curved = ggn.loss_hessian_product(some)
        rounding = torch.finfo(curved.dtype).eps ** 0.5 * curved.abs().max()
        if bool((curved[1 - kept :: 2].abs() > rounding).any()):
            raise UnavailableError("the loss is not a sum over samples")
