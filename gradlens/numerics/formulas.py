"""Pure formulas on small tensors; where one has no value, it returns a NaN with its reason.

N is the number of samples, gₙ their per-sample gradients, ḡ the mean gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.special import stdtrit
from torch import Tensor

from gradlens.history.undefined import Undefined

ONE_SAMPLE = "N = 1: a variance over samples needs two of them"
ZERO_MEAN = "the mean gradient is zero"
NOT_FINITE = "the per-sample gradients contain NaN or Inf"


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
    (Bollapragada et al., 2017).
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
    variance = (sum_of_squares / n).sub_(squared_mean).clamp_(min=0)
    return squared_mean.div_(variance.add_(eps))


def mean_of_elements(tensors: Sequence[Tensor]) -> float:
    """Mean over all elements of all tensors, which are computed from per-sample gradients."""
    total = float(torch.stack([tensor.sum().cpu().double() for tensor in tensors]).sum())
    elements = sum(tensor.numel() for tensor in tensors)
    return total / elements if math.isfinite(total) else Undefined(NOT_FINITE)


def batch_size_rule(
    squared_norms: Tensor, mean_squared_norm: Tensor, learning_rate: float, mean_loss: float
) -> float:
    """Coupled adaptive batch size: η·tr(Σ)/L (Balles et al., 2017, arXiv:1612.05086).

    From ‖gₙ‖² ``[N]`` and ‖ḡ‖², with the population variance tr(Σ) = Σₙ‖gₙ‖²/N − ‖ḡ‖².
    """
    if mean_loss <= 0:
        return Undefined("the loss is not positive: the rule holds for one whose minimum is zero")
    variance = squared_norms.mean() - mean_squared_norm
    size = learning_rate * max(float(variance), 0.0) / mean_loss
    return size if math.isfinite(size) else Undefined(NOT_FINITE)


def early_stopping(mean: Tensor, sum_of_squares: Tensor, n: int, eps: float) -> Tensor:
    """N·ḡⱼ²/(vⱼ + ε) for each element j, with the sample variance vⱼ of gₙⱼ.

    One minus their mean is the evidence-based criterion (Mahsereci et al., 2017,
    arXiv:1703.09580, Eq. 7): positive where gradients can't be distinguished from noise.
    """
    squared_mean = mean.square()
    # Rounding can push a vanishing variance below zero.
    variance = ((sum_of_squares - n * squared_mean) / (n - 1)).clamp_(min=0)
    return n * squared_mean / (variance + eps)


def takeuchi_by_diagonal(
    second_moments: Sequence[Tensor], curvatures: Sequence[Tensor], eps: float, remedy: str
) -> float:
    """Takeuchi's information criterion Σⱼ sⱼ/(cⱼ + ε) with the diagonals of both matrices.

    From sⱼ = Σₙgₙⱼ²/N and the curvature cⱼ, tensor by tensor (Thomas et al., 2020,
    arXiv:1906.07774). NaN where cⱼ isn't positive although sⱼ is; ``remedy`` says what to do then.
    """
    pairs = list(zip(second_moments, curvatures, strict=True))
    flat = sum(int(((c <= 0) & (s > 0)).sum()) for s, c in pairs)
    if flat:
        elements = sum(c.numel() for c in curvatures)
        return Undefined(
            f"the curvature is not positive at {flat} of {elements} elements ({remedy})"
        )
    total = float(torch.stack([(s / (c + eps)).sum() for s, c in pairs]).sum())
    return total if math.isfinite(total) else Undefined(NOT_FINITE)


def takeuchi_by_trace(
    second_moments: Sequence[Tensor], curvatures: Sequence[Tensor], eps: float, remedy: str
) -> float:
    """Takeuchi's information criterion Σⱼsⱼ/(Σⱼcⱼ + ε), as ``takeuchi_by_diagonal``."""
    moment = float(torch.stack([s.sum() for s in second_moments]).sum())
    trace = float(torch.stack([c.sum() for c in curvatures]).sum())
    if trace <= 0 < moment:
        return Undefined(f"the trace of the curvature is not positive: {trace:.4g} ({remedy})")
    ratio = moment / (trace + eps)
    return ratio if math.isfinite(ratio) else Undefined(NOT_FINITE)


BOUNDED_FROM = 59
"""The noise scale has an upper end from this number of samples on.

With a probability of 95 %, at least one of 59 is among the 5 % that have the most noise (Wilks,
1941). Of fewer samples, too many batches don't show that some samples have most of it.
"""

DOMINATING = 0.15
"""One sample's share of the spread from which on the noise scale has no upper end.

The largest of 128 squared normal numbers has a share of about 6 %. No interval with two ends holds
for tails of any weight (Bahadur and Savage, 1956); with this share, those of normal, Student-t and
lognormal noise hold as often as ``benchmarks/intervals.py`` measures.
"""


@dataclass(frozen=True)
class NoiseScale:
    """Simple gradient noise scale B = tr(Σ)/‖G‖² with its 95 % confidence interval.

    ``trace`` and ``squared_norm`` are unbiased estimates of tr(Σ) and ‖G‖², G being the gradient
    of the expected loss.
    """

    value: float
    low: float
    high: float
    trace: float
    squared_norm: float


def noise_scale(squared_norms: Tensor, mean_dots: Tensor, mean_squared_norm: Tensor) -> NoiseScale:
    """From ‖gₙ‖² and ⟨gₙ,ḡ⟩ ``[N]`` and ‖ḡ‖² (McCandlish et al., 2018, arXiv:1812.06162, App. A).

    The interval is Fieller's for a ratio, with the jackknife's covariance of the two estimates. It
    has no upper end where ‖G‖² can't be distinguished from zero, and where samples that aren't in
    the batch may have most of the noise: for fewer than ``BOUNDED_FROM`` samples, and where one of
    them has more than ``DOMINATING`` of the estimates' spread. In these two cases, the lower end is
    the one-sided bound of 95 %.
    """
    n = len(squared_norms)
    if n < 3:
        nan = Undefined(f"N = {n}: an interval takes three samples")
        return NoiseScale(nan, nan, nan, nan, nan)
    everyone = _noise_estimates(squared_norms.sum(), mean_squared_norm, n)
    without = (n**2 * mean_squared_norm - 2 * n * mean_dots + squared_norms) / (n - 1) ** 2
    left_out = _noise_estimates(squared_norms.sum() - squared_norms, without, n - 1)
    covariance = (n - 1) ** 2 / n * torch.cov(left_out)
    trace, squared_norm = everyone.tolist()
    if not bool(covariance.isfinite().all()):
        nan = Undefined(NOT_FINITE)
        known = (x if math.isfinite(x) else nan for x in (trace, squared_norm))
        return NoiseScale(nan, nan, nan, *known)
    if squared_norm > 0:
        value = trace / squared_norm
        bounded = (
            n >= BOUNDED_FROM and _largest_share(left_out[0] - value * left_out[1]) < DOMINATING
        )
    else:
        value = Undefined("the gradient's squared norm can't be distinguished from zero")
        bounded = False
    t = float(stdtrit(n - 1, 0.975 if bounded else 0.95))
    low, high = _fieller(everyone.tolist(), covariance.tolist(), t)
    return NoiseScale(value, low, high if bounded else math.inf, trace, squared_norm)


def _largest_share(influences: Tensor) -> float:
    """The largest squared deviation from the mean over the sum of all, 1 where all are equal."""
    squares = (influences - influences.mean()).square()
    return float((squares.max() / squares.sum()).nan_to_num(nan=1.0))


def _noise_estimates(sum_of_squared_norms: Tensor, mean_squared_norm: Tensor, n: int) -> Tensor:
    """Unbiased tr(Σ) and ‖G‖², ``[2, ...]``."""
    trace = (sum_of_squared_norms - n * mean_squared_norm) / (n - 1)
    return torch.stack([trace, mean_squared_norm - trace / n])


def _fieller(
    estimates: Sequence[float], covariance: Sequence[Sequence[float]], t: float
) -> tuple[float, float]:
    """All r ≥ 0 for which numerator − r·denominator isn't significantly different from zero."""
    top, bottom = estimates
    (top_variance, shared), (_, bottom_variance) = covariance
    a = bottom**2 - t**2 * bottom_variance
    b = top * bottom - t**2 * shared
    c = top**2 - t**2 * top_variance
    root = math.sqrt(max(b**2 - a * c, 0.0))
    if a > 0 and bottom > 0:
        return max((b - root) / a, 0.0), max((b + root) / a, 0.0)
    low = c / (b + root) if b + root > 0 else 0.0
    return max(low, 0.0), math.inf


_LEAST_ERROR = 1e-7
"""The least standard error of an observation in a fit, relative to the largest observation.

It is the rounding error of single precision, in which losses and slopes are mostly computed: equal
losses of all samples don't make the mean more certain than that.
"""


def local_step_size(
    losses: tuple[Tensor, Tensor], slopes: tuple[Tensor, Tensor], length: float
) -> float:
    """Where on a fitted parabola an update of this length ends: −1 start, 0 minimum, 1 mirrored.

    ``losses`` are ℓₙ and ``slopes`` ⟨gₙ,d⟩/‖d‖, each ``[N]``, at both ends of the update d; the
    parabola μ₀ + μ₁x + μ₂x² is fitted to their means by least squares, weighted by the inverse
    variances of these means, and α = 2t/(−μ₁/μ₂) − 1 (Schneider et al., 2021, arXiv:2102.06604).
    Standard errors count as ``_LEAST_ERROR`` of the largest observation at least.
    NaN where there is no such minimum.
    """
    if length == 0:
        return Undefined("the update is zero")
    observed = (*losses, *slopes)
    if min(len(values) for values in observed) < 2:
        return Undefined(ONE_SAMPLE)
    means = torch.stack([values.double().mean() for values in observed])
    variances = torch.stack([values.double().var() / len(values) for values in observed])
    if not bool(means.isfinite().all() and variances.isfinite().all()):
        return Undefined(NOT_FINITE)
    # With the update's length as the unit of x, slopes are comparable to losses, so that the fit
    # doesn't depend on the units of either.
    units = torch.tensor([1.0, 1.0, length, length], dtype=torch.float64)
    means, errors = means * units, variances.sqrt() * units
    largest = float(torch.stack([means.abs(), errors]).max())
    if largest == 0:
        return Undefined("all losses and slopes are zero")
    weights = largest / errors.clamp(min=_LEAST_ERROR * largest)
    design = torch.tensor(
        [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 2.0]], dtype=torch.float64
    )
    fit = torch.linalg.lstsq(weights[:, None] * design, weights * means / largest).solution
    slope, curvature = float(fit[1]), float(fit[2])
    if curvature <= 0:
        return Undefined("the fitted parabola has no minimum: its curvature is not positive")
    if slope == 0:
        return Undefined("the fitted parabola is at its minimum from the start")
    return -2 * curvature / slope - 1


@dataclass(frozen=True)
class Covariance:
    """Spectrum of the covariance of N per-sample gradients.

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
        reason = "all per-sample gradients are equal: the covariance is zero"
        return Covariance(largest, trace, Undefined(reason), Undefined(reason))
    shares = spectrum / trace
    entropy = -float(torch.special.xlogy(shares, shares).sum())
    return Covariance(largest, trace, trace / largest[0], math.exp(entropy))


def _undefined_covariance(reason: str, k: int) -> Covariance:
    nan = Undefined(reason)
    return Covariance([nan] * k, nan, nan, nan)
