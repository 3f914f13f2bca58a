"""Quantities of the gradient's noise: of the whole network, of layers, or of parameters."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import nn

from gradlens.gradients.gradients import layer_of
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics import element_ratios
from gradlens.numerics.deviations import EQUAL, NOT_FINITE, ONE_SAMPLE, ZERO_MEAN, SampleDeviations
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import NEW_COCKPIT, Step
from gradlens.reductions import Deviations, ElementRatios
from gradlens.spelling import near

By: TypeAlias = Literal["network", "layer", "parameter"]

UNTRACKED = f"{{name}} is trained and not tracked: {NEW_COCKPIT}"


@dataclass(eq=False)
class NoiseQuantity(SingleStepQuantity):
    """A quantity that is defined for the per-sample gradients of any set of parameters.

    A value is that of the whole network. With ``by="layer"`` or ``by="parameter"``, it is a dict:
    ``"value"`` is that of the network (if it consists of several numbers, each has its own name),
    and ``"layers"`` or ``"parameters"`` has the same for each layer or parameter by name. A layer
    is the module to which the parameters belong: their names up to the last dot. Its value is a NaN
    with the reason if one of its trained parameters has no per-sample gradients. ``ValueError`` for
    another ``by``, and for layers if the cockpit has no model.
    """

    _: KW_ONLY
    by: By = "network"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by not in get_args(By):
            choices = ", ".join(map(repr, get_args(By)))
            hint = near(str(self.by), get_args(By))
            raise ValueError(f"{self.name}: by={self.by!r} is none of {choices}{hint}")

    @final
    def compute(self, step: Step) -> Any:
        parts = self.parts(step)
        network = self.value(step.total(self.reductions[0]))
        if self.by == "network":
            return network
        entries = network if isinstance(network, dict) else {"value": network}
        untracked = _groups(step.untracked, self.by)
        values: dict[str, Any] = {}
        for name, group in _groups(step.parameters, self.by).items():
            lost = UNTRACKED.format(name=untracked[name][0]) if name in untracked else ""
            why = lost or _why_not_all(step, group, parts)
            if why and isinstance(network, dict):
                values[name] = dict.fromkeys(network, Undefined(why))
            else:
                covered = [parts[each] for each in group if each in parts]
                total = None if why else self.reductions[0].total(covered)
                values[name] = Undefined(why) if why else self.value(total)
        return {**entries, f"{self.by}s": values}

    def parts(self, step: Step) -> Mapping[str, Any]:
        """The first reduction's value for each covered parameter by name, on the host."""
        return step.on_host(self.reductions[0])

    @abstractmethod
    def value(self, total: Any) -> Any:
        """A number, or a dict of numbers by name, from that reduction's total of parameters."""

    @final
    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        if self.by == "layer" and model is None:
            raise ValueError(
                f"{self.name}: which layer a parameter is in is unknown: pass the model, as in "
                "Cockpit(model, ...), instead of its parameters"
            )


def _groups(names: Iterable[str], by: By) -> dict[str, list[str]]:
    """Names of parameters by the layer that they are in, or each by itself."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(layer_of(name) if by == "layer" else name, []).append(name)
    return groups


def _why_not_all(step: Step, names: Sequence[str], covered: Container[str]) -> str:
    """Why a value of these parameters would leave out a part of their gradient; empty if not."""
    removed = [name for name in names if name in step.removed]
    trained = [name for name in names if step.parameters[name].requires_grad]
    lacking = removed or [name for name in trained if name in step.lacking]
    if not lacking and any(name in covered for name in names):
        return ""
    name = (lacking or trained or names)[0]
    return f"{name} has no per-sample gradients: {step.missing[name]}"


class NormTest(NoiseQuantity):
    """Smallest θ for which the norm test holds: relative standard error of the mean gradient.

    √[Σₙ‖gₙ − ḡ‖² / ((N−1)·N·‖ḡ‖²)] (Byrd et al., 2012, Eq. 3.9).
    """

    reductions = (Deviations(),)
    view = View("Norm test", group="gradients", yscale="log", label="θ")

    def value(self, total: SampleDeviations) -> float:
        return _relative_error(total.spread, total, total.noise + total.rounding)


class InnerTest(NoiseQuantity):
    """Smallest θ for which the inner product test holds: spread along the mean gradient.

    √[Σₙ⟨gₙ − ḡ, ḡ⟩² / ((N−1)·N·‖ḡ‖⁴)] (Bollapragada et al., 2017, Eq. 2.6).
    """

    reductions = (Deviations(),)
    view = View("Inner product test", group="gradients", yscale="log", label="θ")

    def value(self, total: SampleDeviations) -> float:
        if total.unknown:
            return Undefined(total.unknown)
        return _relative_error(_spread_along(total), total, total.noise)


class OrthoTest(NoiseQuantity):
    """Smallest ν for which the orthogonality test holds: spread across the mean gradient.

    √[(Σₙ‖gₙ − ḡ‖² − Σₙ⟨gₙ − ḡ, ḡ⟩²/‖ḡ‖²) / ((N−1)·N·‖ḡ‖²)] (Bollapragada et al., 2017).
    """

    reductions = (Deviations(),)
    view = View("Orthogonality test", group="gradients", yscale="log", label="ν")

    def value(self, total: SampleDeviations) -> float:
        if total.unknown:
            return Undefined(total.unknown)
        across = total.spread - _spread_along(total)
        return _relative_error(across, total, total.noise + total.rounding)


class GradNoiseScale(NoiseQuantity):
    """Simple gradient noise scale tr(Σ)/‖G‖² (McCandlish et al., 2018, arXiv:1812.06162).

    A value holds the ``"value"``, the ends ``"low"`` and ``"high"`` of its 95 % confidence
    interval, and the unbiased estimates ``"trace"`` of tr(Σ) and ``"squared_norm"`` of ‖G‖².
    ``"high"`` is infinite if ‖G‖² can't be distinguished from zero, for fewer than 59 samples, and
    if one sample has more than 15 % of the estimates' spread: other batches may have more noise.
    """

    reductions = (Deviations(),)
    ratios: ClassVar[Mapping[str, tuple[str, str]]] = {"value": ("trace", "squared_norm")}
    view = View("Gradient noise scale", group="noise", yscale="log", label="samples")

    def value(self, total: SampleDeviations) -> dict[str, float]:
        return asdict(noise_scale(total))


@dataclass(eq=False)
class MeanGSNR(NoiseQuantity):
    """Mean over all elements j of ḡⱼ² / (variance of gₙⱼ over samples + ε).

    Liu et al., 2020, arXiv:2001.07384, with the population variance as there; ε is ``epsilon``.
    """

    view = View("Mean GSNR", group="noise", yscale="log", label="mean GSNR")

    epsilon: float = 1e-5  # as in cockpit-for-pytorch

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reductions = (ElementRatios(self.epsilon),)

    def parts(self, step: Step) -> Mapping[str, element_ratios.ElementRatios]:
        if step.samples < 2:
            raise UnavailableError(ONE_SAMPLE)
        return super().parts(step)

    def value(self, total: element_ratios.ElementRatios) -> float:
        return element_ratios.mean_ratio(total)


@dataclass(eq=False)
class EarlyStopping(SingleStepQuantity):
    """1 − N·meanⱼ[ḡⱼ²/(vⱼ + ε)], vⱼ the sample variance: stop when it is positive.

    Mahsereci et al., 2017, arXiv:1703.09580, Eq. 7; ε is ``epsilon``. The criterion tests whether
    the gradient of the loss can be distinguished from zero. It holds for any optimizer that
    converges to a zero of this gradient. Weight decay moves the optimum elsewhere: if the optimizer
    is passed to the context and has weight decay, the value is a NaN with this reason.
    """

    view = View("Early stopping", group="noise", label="criterion")

    epsilon: float = 1e-5  # as in cockpit-for-pytorch

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reductions = (ElementRatios(self.epsilon, ddof=1),)

    def compute(self, step: Step) -> float:
        if step.samples < 2:
            return Undefined(ONE_SAMPLE)
        groups = [] if step.optimizer is None else step.optimizer.param_groups
        if any(group.get("weight_decay") for group in groups):
            return Undefined("with weight decay, training doesn't converge to a zero of ∇L")
        ratio = element_ratios.mean_ratio(step.total(self.reductions[0]))
        return ratio if isinstance(ratio, Undefined) else 1 - step.samples * ratio


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
