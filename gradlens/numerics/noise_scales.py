"""Gradient noise scales: from samples, from parts of a batch, and over steps, with intervals.

Each is the ratio of the noise of single samples to the gradient G of the expected loss: the batch
size at which the noise of the mean gradient is as large as G itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from gradlens.history.undefined import Undefined
from gradlens.numerics.deviations import EQUAL, NOT_FINITE, ZERO_MEAN, SampleDeviations
from gradlens.stateful import State

Floats: TypeAlias = NDArray[np.float64]

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


def _undefined(reason: str, **known: float) -> NoiseScale:
    """A noise scale of which only some numbers are known."""
    return NoiseScale(**dict.fromkeys(NUMBERS, Undefined(reason)) | known)


NUMBERS = tuple(each.name for each in fields(NoiseScale))


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
    if n < 2:
        return _undefined(f"N = {n}: a variance over samples needs two of them")
    if found.vanish:
        return _undefined(EQUAL, squared_norm=found.squared_norm_of_mean)
    trace = found.spread / (n - 1)
    squared_norm = found.squared_norm_of_mean - trace / n
    if found.unknown or n < 3:
        return _without_interval(trace, squared_norm, found.unknown or TWO_SAMPLES)
    # Without sample n, the mean is ḡ − (gₙ − ḡ)/(N − 1), and deviations from it are smaller.
    traces = (found.spread - squares * n / (n - 1)) / (n - 2)
    without = squares / (n - 1) ** 2 - 2 * dots / (n - 1)
    left_out = np.stack([traces, without - traces / (n - 1)])
    covariance = (n - 1) ** 2 / n * np.cov(left_out)
    if not np.isfinite(covariance).all():
        return _undefined(NOT_FINITE, **_finite(trace, squared_norm))
    influences = left_out[0] - trace / (squared_norm or math.nan) * left_out[1]
    bounded = n >= BOUNDED_FROM and _largest_share(influences) < DOMINATING
    return _with_interval(trace, squared_norm, covariance, n - 1, bounded)


TWO_SAMPLES = "N = 2: an interval takes three samples"
NO_SQUARED_NORM = "the gradient's squared norm can't be distinguished from zero"


def _without_interval(trace: float, squared_norm: float, reason: str) -> NoiseScale:
    known = _finite(trace, squared_norm)
    if len(known) < 2:
        return _undefined(NOT_FINITE, **known)
    value = trace / squared_norm if squared_norm > 0 else Undefined(NO_SQUARED_NORM)
    return _undefined(reason, value=value, **known)


def _finite(trace: float, squared_norm: float) -> dict[str, float]:
    """Those of the two estimates that are numbers."""
    both = {"trace": trace, "squared_norm": squared_norm}
    return {name: number for name, number in both.items() if math.isfinite(number)}


def _with_interval(
    trace: float, squared_norm: float, covariance: Floats, degrees: float, bounded: bool
) -> NoiseScale:
    """The ratio of two estimates with Fieller's interval, by their covariance.

    All r ≥ 0 for which trace − r·squared_norm isn't significantly different from zero, where the
    covariance has so many ``degrees`` of freedom; from below alone where it isn't ``bounded``.
    """
    bounded = bounded and squared_norm > 0
    t = float(stdtrit(degrees, 0.975 if bounded else 0.95))
    # In units of one of them, powers of the estimates are within the range.
    unit = max(abs(trace), abs(squared_norm)) or 1.0
    top, bottom = trace / unit, squared_norm / unit
    (top_variance, shared), (_, bottom_variance) = (covariance / unit / unit).tolist()
    a = bottom**2 - t**2 * bottom_variance
    b = top * bottom - t**2 * shared
    c = top**2 - t**2 * top_variance
    root = math.sqrt(max(b**2 - a * c, 0.0))
    low, high = c / (b + root) if b + root > 0 else 0.0, math.inf
    if a > 0 and bottom > 0:
        low, high = (b - root) / a, (b + root) / a
    found = _without_interval(trace, squared_norm, "")
    return replace(found, low=max(low, 0.0), high=max(high, 0.0) if bounded else math.inf)


def _largest_share(influences: Floats) -> float:
    """The largest squared deviation from the mean over the sum of all, 1 where all are equal."""
    apart = influences - influences.mean()
    squares = np.square(apart / (np.abs(apart).max() or 1.0))
    total = float(squares.sum())
    return float(squares.max()) / total if total else 1.0


# From the gradients of parts ---------------------------------------------------------------------


@dataclass(frozen=True)
class PartSums:
    """Sums over the parts of a batch, such as micro-batches, by which their gradients differ.

    Part i has Nᵢ samples and a mean gradient gᵢ. What is added up in ``p.grad`` are hᵢ = wᵢgᵢ.
    ``squares`` are Σᵢ‖hᵢ‖²/wᵢ ``[P]`` of P parameters; ``weight`` is Σᵢwᵢ, ``inverse`` Σᵢwᵢ/Nᵢ and
    ``inverse_square`` Σᵢwᵢ²/Nᵢ. ``left_over`` is the sum of norms of what was in ``p.grad`` before
    the first part. ``averaged_over`` so many processes are gradients. ``unknown`` says why there is
    no noise to be had.
    """

    squares: Tensor
    left_over: Tensor
    weight: float
    inverse: float
    inverse_square: float
    count: int = 1
    averaged_over: int = 1
    unknown: str = ""

    def merge(self, other: PartSums) -> PartSums:
        """Of the parts of both."""
        return PartSums(
            self.squares + other.squares.to(self.squares.device),
            self.left_over + other.left_over.to(self.left_over.device),
            self.weight + other.weight,
            self.inverse + other.inverse,
            self.inverse_square + other.inverse_square,
            self.count + other.count,
            self.averaged_over,
            self.unknown or other.unknown,
        )


def noise_between_parts(
    squares: float, squared_norm: float, parts: PartSums, scale: float = 1.0
) -> NoiseScale:
    """From the norms of the parts' gradients and of their sum, of some parameters.

    ``squares`` are those of ``PartSums``, ``squared_norm`` is that of ``p.grad``, from which a
    scaler's ``scale`` is divided off. With pᵢ = wᵢ/Σw and ḡ = Σᵢpᵢgᵢ,

        E Σᵢpᵢ‖gᵢ‖² = ‖G‖² + tr(Σ) Σᵢpᵢ/Nᵢ  and  E‖ḡ‖² = ‖G‖² + tr(Σ) Σᵢpᵢ²/Nᵢ,

    which are solved for the two. Of k parts of b samples each, these are |G_small|² and |G_big|²
    (McCandlish et al., 2018, arXiv:1812.06162, Eq. A.1 and A.2), the former averaged over all
    parts. Norms alone say nothing of the estimates' errors, so that there is no interval.
    """
    weight = parts.weight
    small = squares / weight
    big = squared_norm * (parts.averaged_over * scale / weight) ** 2
    reason = parts.unknown
    if not reason and not (math.isfinite(small) and math.isfinite(big)):
        reason = NOT_FINITE
    elif not reason and float(parts.left_over):
        reason = LEFT_OVER
    elif not reason and big > small * (1 + OF_SUMS):
        reason = MORE_THAN_PARTS
    if reason:
        return _undefined(reason)
    of_parts, of_all = parts.inverse / weight, parts.inverse_square / weight**2
    trace = max(small - big, 0.0) / (of_parts - of_all)
    squared = big - trace * of_all
    found = _without_interval(trace, squared, NO_INTERVAL)
    if small - big <= OF_SUMS * small:
        return replace(found, value=Undefined(SAME_GRADIENT if small else ZERO_MEAN))
    return found


SAME_GRADIENT = "the gradients of parts differ by no more than rounding errors"
OF_SUMS = 1e-5
"""By how much squared norms may be off: a hundred roundings of single precision."""

ONE_PART = (
    "the batch has one part alone: the noise between parts takes several micro-batches "
    "(accumulating=True for all but the last) or processes (DistributedDataParallel)"
)
NO_INTERVAL = "norms of parts have no interval within a step: pass smoothing=0.99, or so"
LEFT_OVER = (
    "p.grad wasn't empty before the first part of the batch: call optimizer.zero_grad() at each "
    "step"
)
MORE_THAN_PARTS = (
    "p.grad is larger than the gradients of the parts together, so that something else has changed "
    "it before the context was left"
)


# Over steps --------------------------------------------------------------------------------------


@dataclass
class AveragePair:
    """Exponential averages of two estimates over steps, and how much these vary between steps.

    The k-th last step has the weight βᵏ. ``weight`` is the sum of all weights, and ``squares`` that
    of their squares; ``comoments`` are Σ w (x − m)(x − m)ᵀ of the pairs x with the mean m.
    ``largest`` is the share of the step that has most of the spread, as seen when it came.
    """

    weight: float = 0.0
    squares: float = 0.0
    mean: Floats = field(default_factory=lambda: np.zeros(2))
    comoments: Floats = field(default_factory=lambda: np.zeros((2, 2)))
    largest: float = 0.0

    def add(self, pair: Sequence[float], beta: float) -> None:
        """A step's estimates (West, 1979)."""
        before = beta * self.weight
        self.weight, self.squares = before + 1, beta**2 * self.squares + 1
        apart = np.asarray(pair, dtype=np.float64) - self.mean
        self.mean = self.mean + apart / self.weight
        added = before / self.weight * np.outer(apart, apart)
        self.comoments = beta * self.comoments + added
        self.largest = max(beta * self.largest, self._of_ratio(added))

    def _of_ratio(self, comoments: Floats) -> float:
        """The spread of trace − value·squared_norm, whose mean is zero."""
        trace, squared_norm = self.mean.tolist()
        direction = np.array([squared_norm, -trace])
        return float(direction @ comoments @ direction) / float(direction @ direction or 1.0)

    def scale(self) -> NoiseScale:
        """The ratio of both means, with Fieller's interval from the variation between steps.

        Of independent steps with weights w, the covariance of a mean is S·Σw²/(Σw)², with S
        unbiased for one step, and as certain as that of (Σw)²/Σw² equal weights (Kish, 1965). If
        the estimates drift, S has the drift in it, and the interval is wider. There is an upper end
        as for ``noise_scale``, with steps in place of samples.
        """
        trace, squared_norm = self.mean.tolist()
        steps = self.weight**2 / self.squares
        if steps < FEWEST_STEPS:
            return _without_interval(trace, squared_norm, FEW_STEPS)
        variances = self.comoments / (self.weight - self.squares / self.weight) / steps
        is_spread = self.largest < DOMINATING_STEP * self._of_ratio(self.comoments)
        bounded = steps >= BOUNDED_FROM and is_spread
        return _with_interval(trace, squared_norm, variances, steps - 1, bounded)


class Averages:
    """The averages of a noise scale's two estimates over steps, by what they are of."""

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._pairs: dict[str, AveragePair] = {}

    def add(self, name: str, found: NoiseScale) -> NoiseScale:
        """The noise scale of the averages; a step without estimates has its reason alone."""
        # A step whose samples are equal has no noise, and must count with that.
        equal = isinstance(found.trace, Undefined) and found.trace.reason == EQUAL
        pair = (0.0 if equal else found.trace, found.squared_norm)
        if not all(map(math.isfinite, pair)):
            nan = next(each for each in pair if not math.isfinite(each))
            return _undefined(nan.reason if isinstance(nan, Undefined) else NOT_FINITE)
        average = self._pairs.setdefault(name, AveragePair())
        average.add(pair, self._beta)
        return average.scale()

    def state_dict(self) -> State:
        """All averages, as numbers."""
        return {
            name: [
                *(each.weight, each.squares, each.largest),
                *(*each.mean.tolist(), *each.comoments.ravel().tolist()),
            ]
            for name, each in self._pairs.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._pairs = {
            name: AveragePair(
                weight, squares, np.array(others[:2]), np.array(others[2:]).reshape(2, 2), largest
            )
            for name, (weight, squares, largest, *others) in state.items()
        }


DOMINATING_STEP = 0.1
"""``DOMINATING`` for steps, whose tails show less, since each of them is a mean over samples.

Of 92 steps, the largest of squared normal numbers has 9 %. With this share, intervals hold for the
same noise, as ``benchmarks/intervals.py`` measures.
"""
FEWEST_STEPS = 3
"""Steps that an interval takes: of two, the variances have one degree of freedom."""
FEW_STEPS = f"an interval over steps takes {FEWEST_STEPS} of them"


# In other norms ----------------------------------------------------------------------------------

DualNorm: TypeAlias = Literal["l1", "nuclear"]


@dataclass(frozen=True)
class DualSums:
    """Numbers of each sample ``[N]``, whose means are bounds of ‖G‖ and of the noise in a norm.

    The bounds are for expectations: that of ``least_gradient`` is at most ‖G‖, and that of
    ``most_gradient`` at least ‖G‖, and so on. The first halves of ``least_gradient`` are along
    the direction of the gradient of the others.
    """

    least_gradient: Tensor
    most_gradient: Tensor
    least_noise: Tensor
    most_noise: Tensor

    def __add__(self, other: DualSums) -> DualSums:
        """Of both parameters together, whose norms add up."""
        return DualSums(
            self.least_gradient + other.least_gradient,
            self.most_gradient + other.most_gradient,
            self.least_noise + other.least_noise,
            self.most_noise + other.most_noise,
        )


@np.errstate(all="ignore")
def dual_noise_scale(found: DualSums) -> NoiseScale:
    """(noise/‖G‖)² in another norm: the batch size at which the noise's bound is ‖G‖.

    By Jensen's inequality, E‖g_B − G‖ ≤ noise/√B for a batch of B samples, with the noise Σⱼσⱼ of
    standard deviations in ℓ₁, and tr √C in the nuclear norm (the dual norms of sign methods and of
    Muon: Naganuma et al., 2026, arXiv:2602.03001). ``trace`` and ``squared_norm`` are the squares
    of the two.

    ‖ḡ‖ alone would have the noise in it, and the ratio would be that of the batch's size. So both
    have bounds, and the interval is from the least ratio to the largest, each of them with
    Student's t for half of the error (Bonferroni). There is no value where the bounds are farther
    apart than a factor of ``APART``; else it is between them. There is no upper end as for
    ``noise_scale``.
    """
    bounds = [each.numpy() for each in (found.most_gradient, found.most_noise, found.least_noise)]
    n = len(bounds[0])
    halves = found.least_gradient.numpy()[: n // 2], found.least_gradient.numpy()[n // 2 :]
    if not all(np.isfinite(each).all() for each in (*bounds, *halves)):
        return _undefined(NOT_FINITE)
    most_gradient, most_noise, least_noise = (float(each.mean()) for each in bounds)
    least_gradient = max(sum(each.sum() for each in halves) / n, 0.0)
    if not most_gradient or not least_noise > 0:
        return _undefined(ZERO_MEAN if least_noise > 0 else EQUAL)
    bounded = n >= BOUNDED_FROM and _largest_share(bounds[1]) < DOMINATING
    share = 0.025 / (2 if bounded else 1)
    errors = [float(stdtrit(n - 1, 1 - share)) * _error(each) for each in bounds]
    # Those of the two halves may go together, so that they are added up.
    of_halves = [float(stdtrit(len(h) - 1, 1 - share)) * _error(h) * len(h) / n for h in halves]
    lowest, highest = least_gradient - sum(of_halves), most_noise + errors[1]
    low = max(least_noise - errors[2], 0.0) / (most_gradient + errors[0])
    high = highest / lowest if bounded and lowest > 0 else math.inf
    ends = least_noise / most_gradient, most_noise / (least_gradient or math.nan)
    if not (ends[1] / ends[0]) ** 2 <= APART:
        return _undefined(BOUNDS_APART.format(n=n), low=low**2, high=high**2)
    trace, squared_norm = most_noise * least_noise, most_gradient * least_gradient
    return NoiseScale(trace / squared_norm, low**2, high**2, trace, squared_norm)


def _error(values: Floats) -> float:
    """Standard error of the mean."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))


FEWEST_SAMPLES = 4
FEW_SAMPLES = (
    f"it takes {FEWEST_SAMPLES} samples: each half of the batch is compared with the other one"
)
APART = 4.0
"""How far the bounds of a noise scale may be apart: their middle is right by a factor of two."""
BOUNDS_APART = (
    "with N = {n} samples, the norm of the gradient can't be told from that of the noise within a "
    "factor of two: use a larger batch, or the interval"
)
