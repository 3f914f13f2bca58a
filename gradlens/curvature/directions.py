"""Directions in which the generalised Gauss-Newton matrix is largest, and the loss along them.

With roots Hₙ = Σₖ sₙₖsₙₖᵀ of the loss's Hessian at each sample's outputs, the matrix is VVᵀ. V has
the columns Jₙᵀsₙₖ, which are N·K at most for K outputs. The Gram matrix VᵀV has the same non-zero
eigenvalues, and if u is its eigenvector, Vu is that of VVᵀ (Dangel et al., 2022, arXiv:2106.02624).
V itself, N·K times as large as the network, is never built: Gram matrices of layers add up, and
those of linear layers follow from inputs and output gradients. Where Gram matrices are too large,
directions come from Lanczos' method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradlens.curvature.eigenpairs import eigenpairs
from gradlens.curvature.hessian import GGNOperator, check_rows
from gradlens.curvature.hessian_roots import roots, signed_sum
from gradlens.curvature.operator import flat, placed, shaped
from gradlens.curvature.products import Seed, float64_device, normal_like
from gradlens.curvature.samples_jacobians import SamplesJacobians
from gradlens.history.undefined import Undefined
from gradlens.numerics.formulas import share_in_span, signal_to_noise
from gradlens.numerics.unavailable import UnavailableError
from gradlens.operators.joined import gram_of_passes
from gradlens.samples.plan import Plans

Floats = NDArray[np.float64]

MAX_COLUMNS = 2048
"""Columns of V above which the Gram matrix isn't computed.

A trade-off: its eigenvectors take a few seconds on one core, and eight times as long for twice
as many columns, where Lanczos' method finds the largest alone.
"""

MAX_BYTES = 2**31
"""Layers' inputs and output gradients of all backward passes may take 2 GiB.

As for BackPACK's matrices: most GPUs have no more than a few times as much memory to spare.
"""

ROUNDINGS = 16
"""Rounding errors that a relative error of V has: 2 of its product with itself, and a margin."""

ZERO = "the generalised Gauss-Newton matrix is zero: the loss is linear in the network's outputs"

TOLERANCE = 1e-3
"""Residual of Lanczos' method relative to each eigenvalue, as that of ``HessMaxEV``."""

MAX_PRODUCTS = 300
"""Products of Lanczos' method, as those of ``HessEigenvalues``."""

MAX_OUTPUTS = 64
"""Outputs of each sample up to which Gram matrices are used.

A trade-off: they take a backward pass for each output, and Lanczos' method usually 30 to 100 passes
in all. They are exact, and cheaper where both take as many.
"""

_Ratios: TypeAlias = tuple[list[float], list[float]]
"""Signal-to-noise ratios of gradient and curvature, along each direction."""


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
        jacobians = SamplesJacobians(ggn, model, plans)
        gram = _gram(jacobians, starts) * ggn.scale
        size = gram.shape[0] - self.samples
        values, vectors = torch.linalg.eigh(gram[:size, :size])
        # To first order, an error δV changes eigenvalues of VᵀV by 2‖V‖‖δV‖ at most; ‖V‖² is the
        # largest, and the trace is the sum of V's squared elements, each right to a few roundings.
        rounding = ROUNDINGS * torch.finfo(ggn.outputs.dtype).eps
        rounding *= float((values[-1].clamp(min=0) * values.sum()).sqrt())
        self.rank = int((values > rounding).sum())
        self._values, self._vectors = values.flip(0)[: self.rank], vectors.flip(1)[:, : self.rank]
        self._along = gram[size:, :size] @ self._vectors * (self.samples * self._values.rsqrt())
        self._along *= ggn.scale**0.5
        # Of the two signs of an eigenvector, the one that doesn't decrease the loss.
        signs = torch.where(self._along.sum(0) < 0, -1.0, 1.0)
        self._vectors, self._along = self._vectors * signs, self._along * signs
        self._squared_gradient = float(gram[size:, size:].sum()) * ggn.scale
        self.eigenvalues: Floats = self._values.cpu().numpy()

    @property
    def trace(self) -> float:
        """The sum of all eigenvalues."""
        return float(self.eigenvalues.sum())

    def eigenvectors(self, k: int) -> NDArray[np.float64]:
        """Unit eigenvectors ``[D, k]`` of the k largest eigenvalues, or of all if k is larger.

        Each takes a backward pass. Their signs are those along which the loss doesn't decrease.
        """
        parts = zip(self._values[:k], self._vectors.T[:k], strict=True)
        found = [self._eigenvector(vector) / float(value) ** 0.5 for value, vector in parts]
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
        return share_in_span(self._along[:, :k].mean(0).cpu().numpy(), self._squared_gradient)

    def _eigenvector(self, vector: Tensor) -> Tensor:
        """V times an eigenvector of the Gram matrix, ``[D]``."""
        weights = vector.reshape(self._columns.shape[:2])
        found = self.ggn.jacobian.transposed_product(signed_sum(self._columns, weights))
        return flat(found, self.ggn.device) * self.ggn.scale**0.5


def _without_zeros(columns: Tensor) -> Tensor:
    """The columns ``[K, N, *C]`` of a root that aren't rounding for all samples.

    Cross-entropy has one such column. Raises ``UnavailableError`` if all are.
    """
    squares = columns.flatten(2).square().sum(2)
    kept = squares.amax(1) > len(columns) * torch.finfo(columns.dtype).eps * squares.max()
    if not bool(kept.any()):
        raise UnavailableError(ZERO)
    return columns[kept]


def _gram(jacobians: SamplesJacobians, starts: list[Tensor]) -> Tensor:
    """⟨Jₙᵀsₙₖ, Jₘᵀsₘₗ⟩ of all pairs of samples n, m and starts k, l, in float64 ``[K·N, K·N]``."""
    samples = len(starts[0])
    columns = samples * (len(starts) - 1)
    if columns > MAX_COLUMNS:
        raise UnavailableError(
            f"{samples} samples with {len(starts) - 1} outputs each are more columns than "
            f"{MAX_COLUMNS}"
        )
    passes = [jacobians.operators(starts[0])]
    needed = sum(each.nbytes for each in passes[0].values()) * len(starts)
    if needed > MAX_BYTES:
        raise UnavailableError(
            f"the layers' inputs and output gradients would take {needed / 2**30:.1f} GiB, more "
            f"than {MAX_BYTES / 2**30:.0f}"
        )
    passes += [jacobians.operators(start) for start in starts[1:]]
    device = float64_device(starts[0].device)
    gram = torch.zeros(columns + samples, columns + samples, dtype=torch.float64, device=device)
    for name in [*passes[0]]:
        gram += gram_of_passes([each.pop(name) for each in passes]).to(device)
    if not bool(gram.isfinite().all()):
        raise UnavailableError("the per-sample gradients contain NaN or Inf")
    return gram


@dataclass(frozen=True)
class Directions:
    """The eigenvectors e of the k largest eigenvalues, by what the loss does along them.

    ``eigenvalues`` are descending. ``gradient`` are the components ḡᵀe of the mean gradient, whose
    sign is that of e and is chosen so that none is negative; ``gradient_snr`` and ``curvature_snr``
    are those of ``DirectionalDerivatives``. Each has k entries, those that don't exist NaN with
    their reason. ``overlap`` is the share of ‖ḡ‖² in the span of all e. ``not_exact`` is empty, or
    the reason why the directions are those of Lanczos' method.
    """

    eigenvalues: Sequence[float]
    gradient: Sequence[float]
    gradient_snr: Sequence[float]
    curvature_snr: Sequence[float]
    overlap: float
    not_exact: str = ""


def directions(
    ggn: GGNOperator, k: int, *, seed: int, model: nn.Module | None, plans: Plans
) -> Directions:
    """The k directions by Gram matrices, or by Lanczos' method where those can't be had.

    Raises ``UnavailableError`` where neither finds them.
    """
    try:
        return _by_gram_matrices(ggn, k, seed, model, plans)
    except UnavailableError as reason:
        return replace(_by_lanczos(ggn, k, seed, model, plans), not_exact=str(reason))


def _by_gram_matrices(
    ggn: GGNOperator, k: int, seed: int, model: nn.Module | None, plans: Plans
) -> Directions:
    """Exact directions; ``UnavailableError`` for more than ``MAX_OUTPUTS`` outputs of a sample."""
    size = ggn.outputs[:1].numel()
    if size > MAX_OUTPUTS:
        raise UnavailableError(f"{size} outputs for each sample are more than {MAX_OUTPUTS}")
    found = LowRankGGN(ggn, model, plans, seed)
    derivatives = found.directional_derivatives(k)
    values, along = found.eigenvalues[:k], derivatives.first.mean(0)
    ratios = derivatives.gradient_snr, derivatives.curvature_snr
    return _directions(values, along, ratios, found.gradient_overlap(k), k)


def _by_lanczos(
    ggn: GGNOperator, k: int, seed: int, model: nn.Module | None, plans: Plans
) -> Directions:
    """Directions to ``TOLERANCE``, without the derivatives of samples where these are coupled."""
    pairs = eigenpairs(ggn, k, tolerance=TOLERANCE, max_products=MAX_PRODUCTS, seed=seed)
    if not pairs.converged:
        raise UnavailableError(f"the largest eigenvalues aren't known: {pairs.reason}")
    kept = pairs.values > pairs.residuals
    if not kept.any():
        raise UnavailableError(ZERO)
    values, vectors = pairs.values[kept], pairs.vectors[:, kept]
    gradient = flat(ggn.jacobian.transposed_product(ggn.loss_gradient), ggn.device) * ggn.scale
    mean: Floats = gradient.cpu().double().numpy()
    along = mean @ vectors
    overlap = share_in_span(along, float(mean @ mean))
    try:
        found = directional_derivatives(ggn, vectors, model, plans)
        ratios = found.gradient_snr, found.curvature_snr
    except UnavailableError as reason:
        none: list[float] = [Undefined(str(reason))] * len(values)
        ratios = none, none
    return _directions(values, np.abs(along), ratios, overlap, k)


def _directions(
    values: Floats, along: Floats, ratios: _Ratios, overlap: float, k: int
) -> Directions:
    """Filled up to k entries."""
    few = Undefined(f"only {len(values)} eigenvalues are above zero by more than rounding")

    def filled(found: Sequence[float]) -> list[float]:
        return [*found, *[few] * (k - len(found))]

    gradient_snr, curvature_snr = map(filled, ratios)
    return Directions(
        filled(values.tolist()), filled(along.tolist()), gradient_snr, curvature_snr, overlap
    )
