"""The directions in which the generalised Gauss-Newton matrix is largest, and the loss along them.

They come from Gram matrices where these are small enough, which is exact, and otherwise from
Lanczos' method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from torch import nn

from gradlens.curvature.directional_derivatives import Floats, directional_derivatives
from gradlens.curvature.eigenpairs import eigenpairs
from gradlens.curvature.hessian import GGNOperator
from gradlens.curvature.low_rank import ZERO, LowRankGGN
from gradlens.curvature.operator import flat
from gradlens.history.undefined import Undefined
from gradlens.numerics.formulas import share_in_span
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.plan import Plans

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
        raise UnavailableError(f"the largest eigenvalues have {pairs.reason}")
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
