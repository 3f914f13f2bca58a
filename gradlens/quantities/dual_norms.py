"""Bounds of the gradient's norm and of its noise, in norms that are dual to those of optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradlens.numerics.noise_scales import FEW_SAMPLES, FEWEST_SAMPLES, DualNorm, DualSums
from gradlens.numerics.tensors import double
from gradlens.numerics.unavailable import UnavailableError
from gradlens.operators.operator import GradientOperator
from gradlens.reductions import ParameterGradients, Reduction


@dataclass(frozen=True)
class DualBounds(Reduction):
    """Bounds of ‖G‖ and of its noise in a ``norm``, as ``DualSums``.

    Batches have four samples or more.
    """

    norm: DualNorm
    names: frozenset[str] | None = None
    passes: ClassVar[int] = 4

    def reduce(self, gradients: ParameterGradients) -> DualSums:
        if gradients.individual.batch_size < FEWEST_SAMPLES:
            raise UnavailableError(FEW_SAMPLES)
        return dual_sums(gradients.elements, self.norm)


def dual_sums(gradients: GradientOperator, norm: DualNorm) -> DualSums:
    """Of one parameter with N samples, at least four.

    A norm is ‖G‖ = max ⟨S, G⟩ over directions S whose dual norm is at most one: signs for ℓ₁, and
    matrices UVᵀ for the nuclear norm. For S that is found from other samples than those of ḡ, E⟨S,
    ḡ⟩ ≤ ‖G‖, so that each half of the batch has its bound from the other half; and E‖ḡ‖ ≥ ‖G‖, as
    norms are convex.
    """
    n = gradients.batch_size
    direction = torch.sign if norm == "l1" else polar_factor
    indices = torch.arange(n, device=gradients.device)
    halves = [gradients.some(each) for each in (indices[: n // 2], indices[n // 2 :])]
    first, second = (direction(half.mean()) for half in halves)
    least = torch.cat([double(halves[0].dot(second)), double(halves[1].dot(first))])
    most = double(gradients.dot(direction(gradients.mean())))
    return DualSums(least, most, *(_l1_noise if norm == "l1" else _nuclear_noise)(gradients))


def _l1_noise(gradients: GradientOperator) -> tuple[Tensor, Tensor]:
    """Pseudo-values of Σⱼσⱼ by the jackknife, which removes the bias of standard deviations."""
    n, found = gradients.batch_size, gradients.element_deviations()
    rows = found.mean.shape[0] if found.mean.dim() else 1
    mean, squares = (double(each).reshape(rows, -1) for each in (found.mean, found.squares))
    without = squares.new_zeros(n)
    for piece in gradients.pieces():
        values = double(piece.values).reshape(len(piece.values), -1)
        apart = values - mean[piece.rows].flatten()
        left = squares[piece.rows].flatten() - apart.square() * (n / (n - 1))
        without[piece.samples] += (left.clamp_(min=0) / (n - 2)).sqrt().sum(1)
    deviation = (squares / (n - 1)).sqrt().sum()
    values = n * deviation - (n - 1) * without
    return values, values


def _nuclear_noise(gradients: GradientOperator) -> tuple[Tensor, Tensor]:
    """Bounds of tr √C with C = E(g − G)(g − G)ᵀ, along the shorter side of m rows or columns.

    By Jensen's inequality, E‖ḡ − G‖ ≤ tr √C/√N, and E tr √Ĉ ≤ tr √C ≤ √(m tr C). The samples'
    shares of the first are those of its derivative, half of tr(C^(−½)(g − ḡ)(g − ḡ)ᵀ).
    """
    n, mean = gradients.batch_size, double(gradients.mean()).flatten(1)
    together = max(AT_ONCE // max(mean.numel(), 1), 1)
    samples = torch.arange(n, device=gradients.device).split(together)

    def apart(some: Tensor) -> Tensor:
        each = double(gradients.some(some).dense()).flatten(2) - mean
        return each if mean.shape[0] <= mean.shape[1] else each.mT

    covariance = mean.new_zeros(min(mean.shape), min(mean.shape))
    for each in map(apart, samples):
        rows = each.transpose(0, 1).flatten(1)
        covariance += rows @ rows.T / (n - 1)
    values, vectors = torch.linalg.eigh(covariance)
    roots = values.clamp(min=0).sqrt()
    inverse = torch.where(values > len(values) * EPS * values[-1], 1 / roots, 0.0)
    turned = [(vectors.T @ each).square().sum(2) for each in map(apart, samples)]
    shares = torch.cat(turned) * (n / (n - 1))
    least = roots.sum() / 2 + (shares @ inverse) / 2
    trace = values.sum().clamp(min=0)
    most = (len(values) * trace).sqrt()
    return least, most / 2 * (1 + shares.sum(1) / trace) if float(trace) else most.expand(n)


AT_ONCE = 2**21
"""Elements in memory at once, in double precision: 16 MiB, as those of ``pieces``."""
EPS = torch.finfo(torch.float64).eps


def polar_factor(matrix: Tensor) -> Tensor:
    """UVᵀ of the singular vectors of a matrix ``[R, *K]`` whose singular values aren't zero."""
    found = double(matrix).flatten(1)
    left, values, right = torch.linalg.svd(found, full_matrices=False)
    kept = values > max(found.shape) * EPS * values[0]
    return ((left * kept) @ right).reshape(matrix.shape)
