"""Pure formulas on small tensors; where one has no value, it returns a NaN with its reason.

N is the number of samples, gₙ their individual gradients, ḡ the mean gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlens.undefined import Undefined

CHUNK = 2**19
"""Elements that are binned at once: small enough to stay in a processor's cache."""

ONE_SAMPLE = "N = 1: a variance over samples needs two of them"
ZERO_MEAN = "the mean gradient is zero"
NOT_FINITE = "the individual gradients contain NaN or Inf"


def norm_test(squared_norms: Tensor, mean_squared_norm: Tensor) -> float:
    """Smallest θ for which the norm test holds: relative standard error of the mean gradient.

    √[(Σₙ‖gₙ‖² − N‖ḡ‖²) / ((N−1)·N·‖ḡ‖²)], from ‖gₙ‖² ``[N]`` and ‖ḡ‖² (Byrd et al., 2012,
    Eq. 3.9).
    """
    spread = squared_norms.sum() - len(squared_norms) * mean_squared_norm
    return _relative_error(spread, len(squared_norms), mean_squared_norm)


def inner_test(mean_dots: Tensor, mean_squared_norm: Tensor) -> float:
    """Smallest θ for which the inner product test holds: spread along the mean gradient.

    √[(Σₙ⟨gₙ,ḡ⟩² − N‖ḡ‖⁴) / ((N−1)·N·‖ḡ‖⁴)], from ⟨gₙ,ḡ⟩ ``[N]`` and ‖ḡ‖² (Bollapragada et
    al., 2017, Eq. 2.6).
    """
    spread = mean_dots.square().sum() - len(mean_dots) * mean_squared_norm**2
    return _relative_error(spread, len(mean_dots), mean_squared_norm**2)


def ortho_test(squared_norms: Tensor, mean_dots: Tensor, mean_squared_norm: Tensor) -> float:
    """Smallest ν for which the orthogonality test holds: spread across the mean gradient.

    √[(Σₙ‖gₙ‖² − Σₙ⟨gₙ,ḡ⟩²/‖ḡ‖²) / ((N−1)·N·‖ḡ‖²)], from ‖gₙ‖² and ⟨gₙ,ḡ⟩ ``[N]`` and ‖ḡ‖²
    (Bollapragada et al., 2017, Eq. 3.3).
    """
    spread = squared_norms.sum() - mean_dots.square().sum() / mean_squared_norm
    return _relative_error(spread, len(squared_norms), mean_squared_norm)


def _relative_error(spread: Tensor, n: int, squared_mean: Tensor) -> float:
    if n < 2:
        return Undefined(ONE_SAMPLE)
    if squared_mean == 0:
        return Undefined(ZERO_MEAN)
    # Rounding can push a vanishing spread below zero.
    value = math.sqrt(max(float(spread), 0.0) / ((n - 1) * n * float(squared_mean)))
    return value if math.isfinite(float(spread)) else Undefined(NOT_FINITE)


def gradient_signal_to_noise(mean: Tensor, sum_of_squares: Tensor, n: int, eps: float) -> Tensor:
    """ḡⱼ² / (Σₙgₙⱼ²/N − ḡⱼ² + ε) for each element j (Liu et al., 2020, arXiv:2001.07384)."""
    squared_mean = mean.square()
    # Rounding can push a vanishing variance below zero.
    variance = (sum_of_squares / n - squared_mean).clamp_(min=0)
    return squared_mean / (variance + eps)


@dataclass(frozen=True)
class Covariance:
    """Spectrum of the covariance of N individual gradients.

    ``eigenvalues`` are the k largest, descending. ``trace`` is the sum of all; ``stable_rank``
    is trace/λ₁; ``effective_rank`` is exp(−Σpᵢ log pᵢ) with pᵢ = λᵢ/trace (Roy and Vetterli, 2007).
    """

    eigenvalues: list[float]
    trace: float
    stable_rank: float
    effective_rank: float


def covariance_spectrum(gram: Tensor, k: int) -> Covariance:
    """Covariance (1/(N−1))·Σₙ(gₙ−ḡ)(gₙ−ḡ)ᵀ of gₙ from their Gram matrix ``[N, N]``.

    The non-zero eigenvalues are those of the doubly centred Gram matrix over N−1, at most N−1
    of them; beyond these, ``eigenvalues`` is filled up with the zeros that the covariance has.
    """
    n = len(gram)
    if n < 2:
        return _undefined_covariance(ONE_SAMPLE, k)
    if not bool(gram.isfinite().all()):
        return _undefined_covariance(NOT_FINITE, k)
    eps, gram = torch.finfo(gram.dtype).eps, gram.double()
    centred = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
    spectrum = torch.linalg.eigvalsh(centred).flip(0).clamp(min=0) / (n - 1)
    largest = spectrum[:k].tolist() + [0.0] * max(k - n, 0)
    trace = float(spectrum.sum())
    # What is left of a zero matrix after centring is rounding.
    if trace <= n * eps * float(gram.diagonal().sum()) / (n - 1):
        reason = "all individual gradients are equal: the covariance is zero"
        return Covariance(largest, trace, Undefined(reason), Undefined(reason))
    shares = spectrum / trace
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    return Covariance(largest, trace, trace / largest[0], math.exp(entropy))


def _undefined_covariance(reason: str, k: int) -> Covariance:
    nan = Undefined(reason)
    return Covariance([nan] * k, nan, nan, nan)


@dataclass(frozen=True)
class Counts:
    """A histogram's integer counts, of any dimension.

    ``below`` and ``above`` count, for each axis, the values outside the range, which are also in
    the outer bins; ``nan`` counts what is in no bin. All are int64 tensors.
    """

    hist: Tensor
    below: Tensor
    above: Tensor
    nan: Tensor

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.hist + other.hist,
            self.below + other.below,
            self.above + other.above,
            self.nan + other.nan,
        )


def histogram_1d(values: Tensor, bins: int, range_: tuple[float, float]) -> Counts:
    """Counts of all elements of ``values`` in equal bins, the last one closed on the right."""
    hist = torch.zeros(bins + 1, dtype=torch.int64, device=values.device)
    below, above = torch.zeros_like(hist[:1]), torch.zeros_like(hist[:1])
    for chunk in values.reshape(-1).split(CHUNK):
        hist += _count(_bin(chunk, bins, range_), bins + 1)
        below += torch.count_nonzero(chunk < range_[0])
        above += torch.count_nonzero(chunk > range_[1])
    return Counts(hist[:-1], below, above, hist[-1])


def histogram_2d(
    values: Tensor,
    companions: Tensor,
    bins: tuple[int, int],
    range_: tuple[tuple[float, float], tuple[float, float]],
) -> Counts:
    """Joint counts of ``values`` ``[n, *Q]`` with ``companions`` ``[*Q]``, the same for all n."""
    inside = bins[0] * bins[1]
    hist = torch.zeros(inside + 1, dtype=torch.int64, device=values.device)
    flat = companions.reshape(-1)
    second = _bin(flat, bins[1], range_[1]).long()
    below, above = torch.zeros(2, 2, dtype=torch.int64, device=values.device)
    rows = values.reshape(len(values), -1)
    for chunk in rows.split(max(CHUNK // max(rows.shape[1], 1), 1)):
        first = _bin(chunk, bins[0], range_[0]).long()
        joint = (first * bins[1] + second).masked_fill_(
            (first == bins[0]) | (second == bins[1]), inside
        )
        hist += _count(joint.reshape(-1), inside + 1)
        below[0] += torch.count_nonzero(chunk < range_[0][0])
        above[0] += torch.count_nonzero(chunk > range_[0][1])
    below[1] = torch.count_nonzero(flat < range_[1][0]) * len(rows)
    above[1] = torch.count_nonzero(flat > range_[1][1]) * len(rows)
    return Counts(hist[:-1].reshape(bins), below, above, hist[-1])


def _bin(values: Tensor, bins: int, range_: tuple[float, float]) -> Tensor:
    """Index of each value's bin, clipped into the outer ones; ``bins`` for a NaN."""
    low, high = range_
    position = (values - low).mul_(bins / (high - low))
    # A NaN passes the clamp and can't be cast.
    position = position.clamp_(0, bins - 1).nan_to_num_(nan=bins)
    return position.to(torch.uint8 if bins < 256 else torch.int32)


def _count(indices: Tensor, length: int) -> Tensor:
    if indices.device.type == "cpu":
        return torch.bincount(indices, minlength=length)
    # bincount reads the largest index back to the host.
    ones = torch.ones((), dtype=torch.int64, device=indices.device).expand(len(indices))
    return torch.zeros(length, dtype=torch.int64, device=indices.device).scatter_add_(
        0, indices.long(), ones
    )
