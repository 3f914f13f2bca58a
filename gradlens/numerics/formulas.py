"""Pure formulas on small tensors; where one has no value, it returns a NaN with its reason.

N is the number of samples, gₙ their per-sample gradients, ḡ the mean gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import entr, stdtrit
from torch import Tensor

from gradlens.history.undefined import Undefined
from gradlens.numerics.deviations import ROUNDINGS, ElementDeviations, SampleDeviations
from gradlens.numerics.histograms import CHUNK
from gradlens.numerics.host import on_host
from gradlens.numerics.precision import double

ONE_SAMPLE = "N = 1: a variance over samples needs two of them"
ZERO_MEAN = "the mean gradient is zero"
NOT_FINITE = "the per-sample gradients contain NaN or Inf"
EQUAL = (
    "the per-sample gradients differ by no more than the rounding errors of their precision: use a "
    "higher precision"
)

TOLERATED = 0.1
"""Error of a mean over elements, relative to it, above which it is NaN.

A trade-off. The bound of a squared error is a hundred times as large as what was found (see
``ROUNDINGS``), so the error itself is far smaller.
"""


def norm_test(found: SampleDeviations) -> float:
    """Smallest θ for which the norm test holds: relative standard error of the mean gradient.

    √[Σₙ‖gₙ − ḡ‖² / ((N−1)·N·‖ḡ‖²)] (Byrd et al., 2012, Eq. 3.9).
    """
    return _relative_error(found.spread, found, found.noise + found.rounding)


def inner_test(found: SampleDeviations) -> float:
    """Smallest θ for which the inner product test holds: spread along the mean gradient.

    √[Σₙ⟨gₙ − ḡ, ḡ⟩² / ((N−1)·N·‖ḡ‖⁴)] (Bollapragada et al., 2017, Eq. 2.6).
    """
    if found.unknown:
        return Undefined(found.unknown)
    return _relative_error(_spread_along(found), found, found.noise)


def ortho_test(found: SampleDeviations) -> float:
    """Smallest ν for which the orthogonality test holds: spread across the mean gradient.

    √[(Σₙ‖gₙ − ḡ‖² − Σₙ⟨gₙ − ḡ, ḡ⟩²/‖ḡ‖²) / ((N−1)·N·‖ḡ‖²)] (Bollapragada et al., 2017).
    """
    if found.unknown:
        return Undefined(found.unknown)
    across = found.spread - _spread_along(found)
    return _relative_error(across, found, found.noise + found.rounding)


def _spread_along(found: SampleDeviations) -> float:
    """Σₙ⟨gₙ − ḡ, ḡ⟩²/‖ḡ‖², zero for a mean of zero."""
    squared_mean = found.squared_norm_of_mean
    return found.squared_dots / squared_mean if squared_mean else 0.0


def _relative_error(spread: float, found: SampleDeviations, rounding: float) -> float:
    n = found.samples
    if n < 2:
        return Undefined(ONE_SAMPLE)
    if found.squared_norm_of_mean == 0:
        return Undefined(ZERO_MEAN)
    if not math.isfinite(spread):
        return Undefined(NOT_FINITE)
    if spread <= rounding:
        return Undefined(EQUAL)
    return math.sqrt(spread / ((n - 1) * n * found.squared_norm_of_mean))


@dataclass(frozen=True)
class ElementRatios:
    """ḡⱼ²/(vⱼ + ε), summed over the elements j of one parameter or of several.

    ``sums`` ``[3]``, in float64, are those of Σₙ(gₙⱼ − ḡⱼ)², of the ratios, and of their squares.
    An error of noise·ḡⱼ² in a denominator is one of noise·ratio relative to it, so that the sum of
    squares times ``noise`` is a bound for the errors of the ratios.
    """

    sums: Tensor
    elements: int
    noise: float


def sum_of_ratios(parts: Sequence[ElementRatios]) -> ElementRatios:
    """Of several parameters."""
    sums = torch.stack([each.sums for each in parts]).sum(0)
    elements = sum(each.elements for each in parts)
    return ElementRatios(sums, elements, max(each.noise for each in parts))


def element_ratios(found: ElementDeviations, divisor: int, eps: float) -> ElementRatios:
    """Of one parameter, with vⱼ = Σₙ(gₙⱼ − ḡⱼ)²/divisor."""
    # As many at once as stay in a processor's cache.
    few = found.mean.numel() <= CHUNK
    pieces = (
        [each] if few else each.flatten().split(CHUNK) for each in (found.mean, found.squares)
    )
    sums = []
    for mean, squares in zip(*pieces, strict=True):
        ratios = mean.to(squares.dtype).square().div_((squares / divisor).add_(eps))
        known = (squares.sum(), ratios.sum(), ratios.square_().sum())
        sums.append(double(torch.stack(known)))
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
    return ElementRatios(total, found.mean.numel(), found.noise)


def gradient_signal_to_noise(found: ElementRatios) -> float:
    """Mean over all elements j of ḡⱼ²/(vⱼ + ε), vⱼ the population variance of gₙⱼ.

    Liu et al., 2020, arXiv:2001.07384, from ``element_ratios`` with N as the divisor.
    """
    if not found.elements:
        return Undefined("the parameter has no elements")
    spread, total, squares = found.sums.tolist()
    if not math.isfinite(spread):
        return Undefined(NOT_FINITE)
    if not found.noise * squares <= TOLERATED * total < math.inf:
        return Undefined(f"{EQUAL}, or a larger epsilon")
    return total / found.elements


def early_stopping(found: ElementRatios, n: int) -> float:
    """1 − N·meanⱼ[ḡⱼ²/(vⱼ + ε)], vⱼ the sample variance of gₙⱼ.

    It is positive where gradients can't be distinguished from noise (Mahsereci et al., 2017,
    arXiv:1703.09580, Eq. 7), from ``element_ratios`` with N − 1 as the divisor.
    """
    ratio = gradient_signal_to_noise(found)
    return ratio if isinstance(ratio, Undefined) else 1 - n * ratio


def batch_size_rule(found: SampleDeviations, learning_rate: float, mean_loss: float) -> float:
    """Coupled adaptive batch size: η·tr(Σ)/L (Balles et al., 2017, arXiv:1612.05086).

    With the population variance tr(Σ) = Σₙ‖gₙ − ḡ‖²/N.
    """
    if found.samples < 2:
        return Undefined(ONE_SAMPLE)
    if mean_loss <= 0:
        return Undefined("the loss is not positive: the rule holds for one whose minimum is zero")
    if found.vanish:
        return Undefined(EQUAL)
    size = learning_rate * found.spread / found.samples / mean_loss
    return size if math.isfinite(size) else Undefined(NOT_FINITE)


def takeuchi_by_diagonal(
    second_moments: Sequence[Tensor], curvatures: Sequence[Tensor], eps: float, remedy: str
) -> float:
    """Takeuchi's information criterion Σⱼ sⱼ/(cⱼ + ε) with the diagonals of both matrices.

    From sⱼ = Σₙgₙⱼ²/N and the curvature cⱼ, tensor by tensor (Thomas et al., 2020,
    arXiv:1906.07774). NaN where cⱼ isn't positive although sⱼ is; ``remedy`` says what to do then.
    """
    pairs = list(zip(second_moments, curvatures, strict=True))
    flat = int(torch.stack([((c <= 0) & (s > 0)).sum() for s, c in pairs]).sum())
    if flat:
        elements = sum(c.numel() for c in curvatures)
        return Undefined(
            f"the curvature is not positive at {flat} of {elements} elements ({remedy})"
        )
    total = float(torch.stack([(s / (c + eps)).sum() for s, c in pairs]).sum())
    return total if math.isfinite(total) else Undefined(NOT_FINITE)


def takeuchi_by_trace(moment: float, trace: float, eps: float, remedy: str) -> float:
    """Takeuchi's information criterion Σⱼsⱼ/(Σⱼcⱼ + ε), as ``takeuchi_by_diagonal``."""
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


@np.errstate(all="ignore")
def noise_scale(found: SampleDeviations) -> NoiseScale:
    """From the deviations of N samples (McCandlish et al., 2018, arXiv:1812.06162, App. A).

    The interval is Fieller's for a ratio, with the jackknife's covariance of the two estimates. It
    has no upper end where ‖G‖² can't be distinguished from zero, and where samples that aren't in
    the batch may have most of the noise: for fewer than ``BOUNDED_FROM`` samples, and where one of
    them has more than ``DOMINATING`` of the estimates' spread. In these two cases, the lower end is
    the one-sided bound of 95 %.
    """
    n, squares, dots = found.samples, found.squared_norms.numpy(), found.dots.numpy()
    if n < 3:
        nan = Undefined(f"N = {n}: an interval takes three samples")
        return NoiseScale(nan, nan, nan, nan, nan)
    if found.vanish:
        nan = Undefined(EQUAL)
        return NoiseScale(nan, nan, nan, nan, found.squared_norm_of_mean)
    trace = found.spread / (n - 1)
    squared_norm = found.squared_norm_of_mean - trace / n
    value = trace / squared_norm if squared_norm > 0 else Undefined(NO_SQUARED_NORM)
    if found.unknown:
        nan = Undefined(found.unknown)
        return NoiseScale(value, nan, nan, trace, squared_norm)
    # Without sample n, the mean is ḡ − (gₙ − ḡ)/(N − 1), and deviations from it are smaller.
    traces = (found.spread - squares * n / (n - 1)) / (n - 2)
    without = squares / (n - 1) ** 2 - 2 * dots / (n - 1)
    left_out = np.stack([traces, without - traces / (n - 1)])
    covariance = (n - 1) ** 2 / n * np.cov(left_out)
    if not np.isfinite(covariance).all():
        nan = Undefined(NOT_FINITE)
        finite = (x if math.isfinite(x) else nan for x in (trace, squared_norm))
        return NoiseScale(nan, nan, nan, *finite)
    # In units of one of them, powers of the estimates are within the range.
    unit = max(abs(trace), abs(squared_norm)) or 1.0
    bounded = (
        squared_norm > 0
        and n >= BOUNDED_FROM
        and _largest_share((left_out[0] - value * left_out[1]) / unit) < DOMINATING
    )
    t = float(stdtrit(n - 1, 0.975 if bounded else 0.95))
    estimates = [trace / unit, squared_norm / unit]
    low, high = _fieller(estimates, (covariance / unit / unit).tolist(), t)
    return NoiseScale(value, low, high if bounded else math.inf, trace, squared_norm)


NO_SQUARED_NORM = "the gradient's squared norm can't be distinguished from zero"


def _largest_share(influences: NDArray[np.float64]) -> float:
    """The largest squared deviation from the mean over the sum of all, 1 where all are equal."""
    squares = np.square(influences - influences.mean())
    total = float(squares.sum())
    return float(squares.max()) / total if total else 1.0


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


@np.errstate(all="ignore")
def local_step_size(
    losses: tuple[Tensor, Tensor],
    slopes: tuple[Tensor, Tensor],
    length: float,
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
    losses, slopes = on_host((losses, slopes))
    observed = [values.double().numpy() for values in (*losses, *slopes)]
    if min(len(values) for values in observed) < 2:
        return Undefined(ONE_SAMPLE)
    means = np.array([values.mean() for values in observed])
    variances = np.array([values.var(ddof=1) / len(values) for values in observed])
    if not np.isfinite([means, variances]).all():
        return Undefined(NOT_FINITE)
    # With the update's length as the unit of x, slopes are comparable to losses, so that the fit
    # doesn't depend on the units of either.
    units = np.array([1.0, 1.0, length, length])
    means, errors = means * units, np.sqrt(variances) * units
    largest = float(np.abs([means, errors]).max())
    if largest == 0:
        return Undefined("all losses and slopes are zero")
    weights = largest / errors.clip(min=_LEAST_ERROR * largest)
    design = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    fit = np.linalg.lstsq(weights[:, None] * design, weights * means / largest, rcond=None)[0]
    slope, curvature = float(fit[1]), float(fit[2])
    if curvature <= 0:
        return Undefined("the fitted parabola has no minimum: its curvature is not positive")
    if slope == 0:
        return Undefined("the fitted parabola is at its minimum from the start")
    return -2 * curvature / slope - 1


def signal_to_noise(values: NDArray[np.float64]) -> list[float]:
    """Of each column of ``values`` ``[N, k]``: its mean's square over the mean's variance.

    N·x̄²/s², with the variance s² over N−1.
    """
    n, k = values.shape
    if n < 2:
        return [Undefined(ONE_SAMPLE)] * k
    squares, variances = values.mean(0) ** 2, values.var(0, ddof=1)
    return [_ratio(n * square, each) for square, each in zip(squares, variances, strict=True)]


def _ratio(square: float, variance: float) -> float:
    if variance > 0 or math.isnan(variance):
        return float(square / variance)
    return math.inf if square else Undefined("the derivatives of all samples are zero")


def share_in_span(components: NDArray[np.float64], squared_norm: float) -> float:
    """Share of ‖ḡ‖² in the span of orthonormal vectors, by the components of ḡ along them."""
    if squared_norm == 0:
        return Undefined(ZERO_MEAN)
    return min(float(np.square(components).sum()) / squared_norm, 1.0)


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


def covariance_spectrum(gram: Tensor, found: SampleDeviations, k: int) -> Covariance:
    """Covariance (1/(N−1))·Σₙ(gₙ−ḡ)(gₙ−ḡ)ᵀ of gₙ from their centred Gram matrix ``[N, N]``.

    The non-zero eigenvalues are those of the Gram matrix over N−1, at most N−1 of them; beyond
    these, ``eigenvalues`` is filled up with the zeros that the covariance has.
    """
    n = len(gram)
    # What is lost where a Gram matrix of factors is centred.
    rounding = ROUNDINGS * torch.finfo(gram.dtype).eps * n * found.squared_norm_of_mean
    if n < 2:
        return _undefined_covariance(ONE_SAMPLE, k)
    # In numpy, whose operations on few numbers take less time.
    products = gram.cpu().numpy()
    if not np.isfinite(products).all():
        return _undefined_covariance(NOT_FINITE, k)
    if found.vanish or 0 < products.trace() <= rounding:
        return _undefined_covariance(EQUAL, k)
    spectrum = np.flip(np.linalg.eigvalsh(products)).clip(min=0) / (n - 1)
    largest = spectrum[:k].tolist() + [0.0] * max(k - n, 0)
    trace = float(spectrum.sum())
    if not trace:
        reason = "all per-sample gradients are equal: the covariance is zero"
        return Covariance(largest, trace, Undefined(reason), Undefined(reason))
    entropy = float(entr(spectrum / trace).sum())
    return Covariance(largest, trace, trace / largest[0], math.exp(entropy))


def _undefined_covariance(reason: str, k: int) -> Covariance:
    nan = Undefined(reason)
    return Covariance([nan] * k, nan, nan, nan)
