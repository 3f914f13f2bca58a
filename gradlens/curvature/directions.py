"""Directions in which the generalised Gauss-Newton matrix is largest, and the loss along them.

With roots Hₙ = Σₖ sₙₖsₙₖᵀ of the loss's Hessian at each sample's outputs, the matrix is VVᵀ. V has
the columns Jₙᵀsₙₖ, which are N·K at most for K outputs. The Gram matrix VᵀV has the same non-zero
eigenvalues, and if u is its eigenvector, Vu is that of VVᵀ (Dangel et al., 2022, arXiv:2106.02624).
V itself, N·K times as large as the network, is never built: Gram matrices of layers add up, and
those of linear layers follow from inputs and output gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradlens.curvature.factors import SamplesJacobians, gram_of_starts, roots, signed_sum
from gradlens.curvature.hessian import GGNOperator, check_rows
from gradlens.curvature.operator import Seed, flat, normal_like, placed, shaped
from gradlens.history.undefined import Undefined
from gradlens.numerics.deviations import ONE_SAMPLE, ZERO_MEAN
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.plan import Plans

Floats = NDArray[np.float64]

MAX_COLUMNS = 2048
"""Columns of V above which the Gram matrix isn't computed.

A trade-off: its eigenvectors take a few seconds on one core, and eight times as long for twice
as many columns. ``eigenpairs`` finds the largest alone, by products.
"""

ROUNDINGS = 16
"""Rounding errors that a relative error of V has: 2 of its product with itself, and a margin."""

ZERO = "the generalised Gauss-Newton matrix is zero: the loss is linear in the network's outputs"


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
    SamplesJacobians(ggn.jacobian, model, plans)  # refuses coupled samples
    factor = len(ggn.outputs) * ggn.scale
    gradient = ggn.loss_gradient
    first, second = [], []
    for direction in torch.tensor(directions.T, device="cpu"):
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


@dataclass(frozen=True)
class Directions:
    """The eigenvectors e of the k largest eigenvalues, by what the loss does along them.

    ``eigenvalues`` are descending. ``gradient`` are the components ḡᵀe of the mean gradient, whose
    sign is that of e and is chosen so that none is negative; ``gradient_snr`` and ``curvature_snr``
    are those of ``DirectionalDerivatives``. Each has k entries, those that don't exist NaN with
    their reason. ``overlap`` is the share of ‖ḡ‖² in the span of all e.
    """

    eigenvalues: Sequence[float]
    gradient: Sequence[float]
    gradient_snr: Sequence[float]
    curvature_snr: Sequence[float]
    overlap: float


@final
class LowRankGGN:
    """The generalised Gauss-Newton matrix ``[D, D]`` of a ``GGNOperator``, by its factors.

    ``eigenvalues`` ``[R]`` are all that aren't zero to rounding, descending; ``rank`` is R and
    ``samples`` N. Everything but ``eigenvectors`` is computed from one Gram matrix, of V and of the
    samples' gradients, in one backward pass for each column of a root and one for the gradients.
    The rows of the network's outputs are the samples.

    Raises ``UnavailableError`` where samples are coupled, as by ``BatchNorm`` in train mode; where
    a parameter has no per-sample gradients; for a loss that isn't a convex sum over samples; for
    more than 256 outputs of each sample, 2048 columns of V or 2 GiB of layers' inputs and output
    gradients; and for NaN or Inf. Pass the ``model`` if modules of it have hooks, which then don't
    run. ``plans`` hold from step to step which rows belong to which sample.
    """

    def __init__(
        self,
        ggn: GGNOperator,
        model: nn.Module | None = None,
        plans: Plans | None = None,
        seed: Seed = 0,
    ) -> None:
        self.ggn = ggn
        self.samples = len(ggn.outputs) if ggn.outputs.dim() else 0
        self._columns = _without_zeros(roots(ggn, np.random.default_rng(seed)))
        starts = [*self._columns, ggn.loss_gradient]
        jacobians = SamplesJacobians(ggn.jacobian, model, plans)
        columns = self.samples * len(self._columns)
        if columns > MAX_COLUMNS:
            raise UnavailableError(
                f"{self.samples} samples with {len(self._columns)} outputs each are more columns "
                f"than {MAX_COLUMNS}"
            )
        gram = gram_of_starts(jacobians, starts) * ggn.scale
        values, vectors = torch.linalg.eigh(gram[:columns, :columns])
        # To first order, an error δV changes eigenvalues of VᵀV by 2‖V‖‖δV‖ at most; ‖V‖² is the
        # largest, and the trace is the sum of V's squared elements, each right to a few roundings.
        rounding = ROUNDINGS * torch.finfo(ggn.outputs.dtype).eps
        rounding *= float((values[-1].clamp(min=0) * values.sum()).sqrt())
        self.rank = int((values > rounding).sum())
        self._values, self._vectors = values.flip(0)[: self.rank], vectors.flip(1)[:, : self.rank]
        self._along = (
            gram[columns:, :columns] @ self._vectors * (self.samples * self._values.rsqrt())
        )
        self._along *= ggn.scale**0.5
        # Of the two signs of an eigenvector, the one that doesn't decrease the loss.
        signs = torch.where(self._along.sum(0) < 0, -1.0, 1.0)
        self._vectors, self._along = self._vectors * signs, self._along * signs
        self._squared_gradient = float(gram[columns:, columns:].sum()) * ggn.scale
        self.eigenvalues: Floats = self._values.cpu().numpy()

    @property
    def trace(self) -> float:
        """The sum of all eigenvalues."""
        return float(self.eigenvalues.sum())

    def eigenvectors(self, k: int) -> NDArray[np.float64]:
        """Unit eigenvectors ``[D, k]`` of the k largest eigenvalues, or of all if k is larger.

        Each takes a backward pass. Their signs are those along which the loss doesn't decrease.
        """
        found = []
        for value, vector in zip(self._values[:k], self._vectors.T[:k], strict=True):
            weights = vector.reshape(self._columns.shape[:2])
            start = signed_sum(self._columns, weights)
            product = flat(self.ggn.jacobian.transposed_product(start), self.ggn.device)
            found.append(product * self.ggn.scale**0.5 / float(value) ** 0.5)
        return torch.stack(found, dim=1).cpu().double().numpy()

    def directional_derivatives(self, k: int) -> DirectionalDerivatives:
        """Each sample's derivatives along the first k eigenvectors, or along all."""
        squares = self._vectors[:, :k].square().unflatten(0, (-1, self.samples)).sum(0)
        second = squares * (self.samples * self._values[:k])
        return DirectionalDerivatives(self._along[:, :k].cpu().numpy(), second.cpu().numpy())

    def gradient_overlap(self, k: int) -> float:
        """Share of ‖ḡ‖² in the span of the first k eigenvectors (Gur-Ari et al., 2018).

        NaN with its reason if the mean gradient ḡ is zero.
        """
        if self._squared_gradient == 0:
            return Undefined(ZERO_MEAN)
        components = self._along[:, :k].mean(0)
        return min(float(components.square().sum()) / self._squared_gradient, 1.0)

    def directions(self, k: int) -> Directions:
        """The first k eigenvectors, by what the loss does along them."""
        derivatives, values = self.directional_derivatives(k), self.eigenvalues[:k]
        few = Undefined(f"only {len(values)} eigenvalues are above zero by more than rounding")

        def filled(found: Sequence[float]) -> list[float]:
            return [*found, *[few] * (k - len(found))]

        return Directions(
            filled(values.tolist()),
            filled(derivatives.first.mean(0).tolist()),
            filled(derivatives.gradient_snr),
            filled(derivatives.curvature_snr),
            self.gradient_overlap(k),
        )


def _without_zeros(columns: Tensor) -> Tensor:
    """The columns ``[K, N, *C]`` of a root that aren't rounding for all samples.

    Cross-entropy has one such column. Raises ``UnavailableError`` if all are.
    """
    squares = columns.flatten(2).square().sum(2)
    kept = squares.amax(1) > len(columns) * torch.finfo(columns.dtype).eps * squares.max()
    if not bool(kept.any()):
        raise UnavailableError(ZERO)
    return columns[kept]


def signal_to_noise(values: NDArray[np.float64]) -> list[float]:
    """Of each column of ``values`` ``[N, k]``: its mean's square over the mean's variance.

    N·x̄²/s², with the variance s² over N−1.
    """
    n, k = values.shape
    if n < 2:
        return [Undefined(ONE_SAMPLE)] * k
    squares, variances = n * values.mean(0) ** 2, values.var(0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = squares / variances
    zero = Undefined("the derivatives of all samples are zero")
    are_zero = (squares == 0) & (variances == 0)
    return [zero if one else float(ratio) for one, ratio in zip(are_zero, ratios, strict=True)]
