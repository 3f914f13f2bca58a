"""What a step is worth, and the optimizer's settings: local step size, batch size, stability."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.eigenpairs import WarmStartedEigenpairs
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.probe import Probe
from gradlens.history.coverage import few
from gradlens.history.setup import passed_by_momentum
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import EQUAL, NOT_FINITE, ONE_SAMPLE
from gradlens.numerics.shards import whole
from gradlens.numerics.tensors import accumulable, on_host
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.moments import READERS
from gradlens.quantities.quantity import (
    GradientCurvatureQuantity,
    SingleStepQuantity,
    TwoPointQuantity,
)
from gradlens.quantities.step import Step, losses_of_samples
from gradlens.quantities.update import Update, why_not_held
from gradlens.reductions import Deviations


class Alpha(TwoPointQuantity):
    """Local effective step size α: the position on a fitted parabola at which the update ends.

    −1 is the start point, 0 the parabola's minimum, and 1 the point beyond the minimum at the same
    height as the start point (Schneider et al., 2021, arXiv:2102.06604). Losses and slopes at the
    two ends are those of the two steps' batches. The update is the one that the optimizer, of
    whatever kind, has made. If it has moved parameters without per-sample gradients, or if
    something else has changed parameters between an optimizer's step and the next context, the
    value is a NaN.
    """

    needs = ("individual_losses",)
    measures = (losses_of_samples,)
    view = View("Local step size α", group="step size", label="α")

    def compute(self, start: Step, update: Update, end: Step) -> float:
        length = update.norm()
        if length == 0:
            return Undefined("the update is zero")
        if start.individual_losses is None or end.individual_losses is None:
            return Undefined(NO_LOSSES.format(why=start.without_losses or end.without_losses))
        if update.projections is None or update.end_projections is None:
            return Undefined(update.without_projections or NO_GRADIENTS)
        unknown = {n for n in start.lacking | end.lacking if bool(update.direction[n].any())}
        unknown |= {*start.untracked, *end.untracked}
        if unknown:
            return Undefined(PARTLY.format(names=few(sorted(unknown))))
        losses = (start.individual_losses, end.measured(losses_of_samples))
        samples = (len(update.projections), len(update.end_projections))
        for one, number in zip(losses, samples, strict=True):
            if one.numel() != number:
                return Undefined(OF_ROWS.format(rows=one.numel(), samples=number))
        slopes = (update.projections / length, update.end_projections / length)
        return local_step_size(losses, slopes, length)


NO_GRADIENTS = "no per-sample gradients at one of the two steps"
NO_LOSSES = "there are no per-sample losses at one of the two steps: {why}"
PARTLY = (
    "the slopes along the update are unknown, since {names} have moved and aren't tracked, or have "
    "no per-sample gradients at one of the two steps"
)
OF_ROWS = (
    "there are {rows} losses of {samples} samples: call the loss module with one row for each "
    "sample, such as outputs of shape [N, C, T] instead of [N·T, C], or pass the samples' losses "
    "to the context, as individual_losses=..."
)


_LEAST_ERROR = 1e-7
"""The least standard error of an observation in a fit, relative to the largest observation.

It is the rounding error of single precision, in which losses and slopes are mostly computed: equal
losses of all samples don't make the mean more certain than that.
"""


@np.errstate(all="ignore")
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


class CABS(SingleStepQuantity):
    """Coupled adaptive batch size η·tr(Σ)/L (Balles et al., 2017, arXiv:1612.05086).

    The rule is derived from the expected gain of one step −η·∇L of plain gradient descent with one
    learning rate η, for a loss whose minimum is zero. If the loss isn't positive, or the optimizer
    is another one, the value is a NaN. L and η are those of the mean loss: a step of η on a sum
    loss is equal to a step of Nη on the mean loss, and the same holds for any other factor of the
    loss on which backward is called.
    """

    reductions = (Deviations(),)
    needs = ("loss", "optimizer")
    view = View("Batch size", group="noise", yscale="log", label="batch size")

    def compute(self, step: Step) -> float:
        learning_rate = plain_sgd_learning_rate(step.optimizer) * step.gradient_factor
        problem = "" if step.optimizer is None else why_not_held(step.optimizer, step.parameters)
        if problem:
            raise UnavailableError(problem)
        found, mean_loss = step.total(Deviations()), step.mean_loss()
        if found.samples < 2:
            return Undefined(ONE_SAMPLE)
        if mean_loss <= 0:
            return Undefined(
                "the loss is not positive: the rule holds for one whose minimum is zero"
            )
        if found.vanish:
            return Undefined(EQUAL)
        # With the population variance tr(Σ) = Σₙ‖gₙ − ḡ‖²/N.
        size = learning_rate * found.spread / found.samples / mean_loss
        return size if math.isfinite(size) else Undefined(NOT_FINITE)


def plain_sgd_learning_rate(optimizer: Optimizer | None) -> float:
    """η of plain SGD; ``UnavailableError`` if the optimizer is another one."""
    groups = [] if optimizer is None else optimizer.param_groups
    extras = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
    used = sorted({extra for group in groups for extra in extras if group.get(extra)})
    rates = {float(group["lr"]) for group in groups}
    problem = ""
    if type(optimizer) is not SGD:
        problem = f"the optimizer is {type(optimizer).__name__}"
    elif used:
        problem = f"the optimizer uses {', '.join(used)}"
    elif len(rates) > 1:
        problem = f"there are {len(rates)} learning rates"
    if problem:
        raise UnavailableError(
            f"CABS is derived for plain SGD with one learning rate, but {problem}: leave it "
            "out, or use GradNoiseScale, a batch size that doesn't depend on the optimizer"
        )
    return rates.pop()


@dataclass(eq=False)
class Stability(GradientCurvatureQuantity):
    """Sharpness, and the threshold above which the optimizer is unstable on a quadratic.

    ``"sharpness"`` is the largest eigenvalue of the Hessian H of the mean loss, or of P⁻¹H if the
    optimizer divides gradients by P. ``"threshold"`` is 2/η for gradient descent with learning rate
    η, and with momentum β it is (2+2β)/η, over 1+2β with Nesterov's and over 1−d with dampening d
    (Cohen et al., 2021, arXiv:2103.00065). For Adam it is (2+2β₁)/((1−β₁)η) (Cohen et al., 2022,
    arXiv:2207.14484), for RMSprop that of momentum, and for Adagrad 2/η. Decoupled weight decay λ,
    as AdamW's, replaces 2 by 2 − ηλ, and coupled one is added to the diagonal of H. ``"ratio"`` is
    sharpness over threshold: on a quadratic, the step is unstable if and only if it is above 1.
    Where parameter groups have different settings, the threshold is the lowest one, and the
    curvature of a parameter is multiplied by the lowest threshold over its own.

    A step of η on a sum loss is equal to a step of Nη on the mean loss, so that η is multiplied by
    N, or P divided by N. The same holds for any other factor of the loss on which backward is
    called. If it isn't a multiple of the loss, for example because of a regulariser, values are
    NaN. Where there is a P, they are also NaN before the optimizer's first step, and elements whose
    gradients have all been zero aren't counted. Muon and sign
    methods have no threshold, and of other optimizers none is known. ``tolerance`` and
    ``max_products`` are those of ``HessMaxEV``.

    With a probe, ``on``, H is the Hessian of its mean loss. The threshold is that of the
    optimizer's step on the step's own loss, so that ``loss`` is still needed, and for a sum loss
    ``batch_size``, too.
    """

    needs = ("loss", "optimizer")
    view = View("Edge of stability", group="curvature", yscale="symlog", label="sharpness")

    tolerance: float = 1e-3
    max_products: int = 100
    on: Probe | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._eigenpairs = self.keeps = WarmStartedEigenpairs(self.tolerance, self.max_products)

    def before_backward(self, curvature: Curvature) -> tuple[float, StabilityLimit]:
        """The largest eigenvalue, a NaN if it isn't found, and the limit that it is compared with.

        Both are those of the loss itself; with a probe, those of a step on a mean loss.
        """
        assert curvature.optimizer is not None  # the cockpit has checked `needs`
        if curvature.is_part and curvature.batch.loss_reduction == "sum":
            raise UnavailableError(SUM_OVER_PARTS)
        factor = curvature.loss_factor if self.on is None else 1
        limit = stability_limit(curvature.optimizer, curvature.held, factor)
        is_plain = not limit.scaling and limit.shift is not None
        matrix = curvature.hessian if is_plain else _OfStep(curvature.hessian, limit)
        found = self._eigenpairs(matrix, curvature.seed)
        value = float(found.values[0]) if found.converged else Undefined(found.reason)
        return value, limit

    def compute(self, step: Step, earlier: tuple[float, StabilityLimit]) -> dict[str, float]:
        (sharpness, limit), weight = earlier, self._weight(step)
        if limit.shift is None and weight != 1:
            raise UnavailableError(WITH_DECAY)
        threshold = limit.threshold if limit.is_preconditioned else limit.threshold / weight
        if isinstance(sharpness, Undefined):
            return {"sharpness": sharpness, "threshold": threshold, "ratio": sharpness}
        sharpness *= weight if limit.is_preconditioned else 1
        sharpness += (limit.shift or 0.0) / weight
        return {"sharpness": sharpness, "threshold": threshold, "ratio": sharpness / threshold}

    def _weight(self, step: Step) -> float:
        """Of what the optimizer minimises, over the loss that the threshold is of."""
        if step.loss_weight < 0:
            raise UnavailableError(NEGATIVE)
        if isinstance(step.loss_weight, Undefined):
            raise UnavailableError(step.loss_weight.reason)
        if self.on is None:
            return step.loss_weight
        if step.loss_reduction == "sum" and step.batch_size is None:
            raise UnavailableError(UNKNOWN_SIZE)
        return step.gradient_factor


@dataclass(frozen=True)
class StabilityLimit:
    """A step is stable if the largest eigenvalue of S(H + Λ)S is below ``threshold``.

    ``scaling`` is the diagonal of S, a tensor of its shape or a number for each parameter; it is
    empty if S is the identity. ``decay`` is that of Λ, the weight decay that the optimizer adds to
    the gradient of each parameter; it is empty without any. If S ``is_preconditioned``, a factor of
    the loss is one of sharpness, and else one of the rate.
    """

    threshold: float
    is_preconditioned: bool = False
    scaling: tuple[Tensor | float, ...] = ()
    decay: tuple[float, ...] = ()

    @property
    def shift(self) -> float | None:
        """What Λ adds to each eigenvalue of SHS; ``None`` if they change in other ways."""
        if not self.decay:
            return 0.0
        return None if self.scaling or len({*self.decay}) > 1 else self.decay[0]


SUM_OVER_PARTS = (
    "the step on a sum loss grows with the number of samples, which isn't known before all "
    "parts of the batch are there: use a mean loss"
)
UNKNOWN_SIZE = (
    "the step on a sum loss grows with the number of samples, which isn't known: pass "
    "info={'batch_size': N} to the context, or use a mean loss"
)
NEGATIVE = (
    "backward was called on a negative multiple of the loss: maximising is never stable on a "
    "quadratic with a minimum"
)


WITH_DECAY = (
    "backward was called on a multiple of the loss or on parts of it, and weight decay is added to "
    "the gradients of an optimizer that divides them, or has several groups: pass the multiple to "
    "the context, or use decoupled weight decay"
)
DECAY_ALONE = (
    "weight decay alone is unstable, since its product with the learning rate is 2 or more: lower "
    "one of them"
)
MOMENTUM_ALONE = "momentum of 1 or more is unstable with any learning rate: lower it"
MAXIMISING = "maximising is never stable on a quadratic with a minimum"
NO_MOMENTS = "{kind} has no moments of gradients to divide by before its first step: {names}"
NOT_FINITE_MOMENTS = "what {kind} divides gradients by is NaN or Inf somewhere in {names}"
NO_GRADIENT_YET = "all gradients that {kind} has had are zero, so that it has nothing to divide by"
UNKNOWN = (
    "no threshold is known for {kind}: there is one for SGD, Adam, AdamW, RMSprop and Adagrad, "
    "whose steps are linear as long as what they divide by stays as it is"
)
OF_ONE_LENGTH = (
    "no curvature is too large for {kind}: its steps are as long for small gradients as for large "
    "ones, so that they can't grow from step to step as those of an unstable optimizer do"
)
MOMENTS: Mapping[type[Optimizer], str] = {
    Adam: "exp_avg_sq",
    AdamW: "exp_avg_sq",
    RMSprop: "square_avg",
    Adagrad: "sum",
}
"""The state of which an optimizer divides by the root."""
WITHOUT_SIZE = ("Muon", "Lion", "SignSGD", "Signum")
"""Names of optimizers, few of them torch's, whose steps have signs or singular vectors alone."""


def stability_limit(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], loss_factor: float = 1
) -> StabilityLimit:
    """The limit at the optimizer's next step, which is on ``loss_factor`` times the mean loss.

    The threshold is the least limit of all parameters, and S² is the threshold over each one's own
    limit, and over what its gradient is divided by. ``UnavailableError`` where no limit is known.
    """
    kind = type(optimizer)
    problem = why_not_held(optimizer, parameters)
    if kind is not SGD and kind not in MOMENTS:
        why = OF_ONE_LENGTH if kind.__name__ in WITHOUT_SIZE else UNKNOWN
        problem = why.format(kind=kind.__name__)
    elif any(map(_maximises, optimizer.param_groups)):
        problem = MAXIMISING
    if problem:
        raise UnavailableError(problem)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    chosen = {name: groups[id(p)] for name, p in parameters.items()}
    limits = {name: _limit(group) for name, group in chosen.items()}
    threshold = min(limits.values())
    shares = [threshold / limit if threshold < math.inf else 1.0 for limit in limits.values()]
    added = tuple(
        0.0 if group.get("decoupled_weight_decay") else float(group["weight_decay"]) / loss_factor
        for group in chosen.values()
    )
    decay = added if any(added) else ()
    if kind is SGD:
        factors = () if all(share == 1 for share in shares) else tuple(map(math.sqrt, shares))
        return StabilityLimit(threshold / loss_factor, False, factors, decay)
    divisors = _divisors(optimizer, parameters, chosen)
    scaling = tuple(
        (share * loss_factor / divisor).sqrt()
        for share, divisor in zip(shares, divisors, strict=True)
    )
    return StabilityLimit(threshold, True, scaling, decay)


def _maximises(group: Mapping[str, Any]) -> bool:
    """Whether a step goes up; with dampening above 1, momentum is of negative gradients."""
    return bool(group.get("maximize") or (group.get("momentum") and group.get("dampening", 0) > 1))


def _limit(group: Mapping[str, Any]) -> float:
    """The curvature above which a single coordinate diverges, if its gradient isn't divided.

    It is (2 − ηλ)/(ηa) with the learning rate η, decoupled decay λ, and the share a of a gradient
    of alternating sign that passes the momentum. ``docs/quantities.rst`` has the proof.
    """
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    shrinks = rate * decay if group.get("decoupled_weight_decay") else 0.0
    if shrinks >= 2:
        raise UnavailableError(DECAY_ALONE)
    momentum = float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
    if momentum >= 1:
        raise UnavailableError(MOMENTUM_ALONE)
    dampening, nesterov = float(group.get("dampening", 0.0)), bool(group.get("nesterov"))
    passed = passed_by_momentum(momentum, dampening, nesterov)
    if "betas" in group:  # an average of gradients instead of a sum
        passed *= 1 - momentum
    return (2 - shrinks) / (rate * passed) if rate * passed else math.inf


def _divisors(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], groups: Mapping[str, Mapping[str, Any]]
) -> list[Tensor]:
    """What each parameter's gradient is divided by, as at the last step, with its corrections.

    It is ∞ for elements whose gradients have all been zero, such as rows of an embedding that
    weren't used: what is there won't stay as it is at their first gradient.
    """
    kind = type(optimizer)
    states = {
        name: {
            key: whole(each) if isinstance(each, Tensor) else each
            for key, each in optimizer.state.get(p, {}).items()
        }
        for name, p in parameters.items()
    }
    counts = on_host({name: state.get("step", 0) for name, state in states.items()})
    if lacking := [name for name, count in counts.items() if not count]:
        raise UnavailableError(NO_MOMENTS.format(kind=kind.__name__, names=few(lacking)))
    divisors, facts = [], []
    for name, state in states.items():
        group, moments = groups[name], state[MOMENTS[kind]]
        kept = READERS[kind](state, group)
        assert kept.second is not None
        divisor = (accumulable(kept.second) / kept.weights[1]).sqrt() + kept.floor
        # Adam's correction of its first moments, and the decay of Adagrad's rate.
        divisor *= kept.weights[0] * (1 + (float(counts[name]) - 1) * group.get("lr_decay", 0))
        facts.append(
            torch.stack([(moments > 0).any(), ((divisor >= 0) & divisor.isfinite()).all()])
        )
        divisors.append(divisor.masked_fill(moments == 0, torch.inf))
    known = [fact.tolist() for fact in on_host(facts)]
    if wrong := [name for name, (_, fine) in zip(states, known, strict=True) if not fine]:
        raise UnavailableError(NOT_FINITE_MOMENTS.format(kind=kind.__name__, names=few(wrong)))
    if not any(used for used, _ in known):
        raise UnavailableError(NO_GRADIENT_YET.format(kind=kind.__name__))
    return divisors


class _OfStep(CurvatureOperator):
    """S(H + Λ)S."""

    def __init__(self, hessian: CurvatureOperator, limit: StabilityLimit) -> None:
        super().__init__(hessian.parameters, 1.0)
        self.hessian, self.limit = hessian, limit

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        scaled = self._scaled(vectors)
        found = self.hessian.product(scaled)
        if self.limit.decay:
            terms = zip(found, scaled, self.limit.decay, strict=True)
            found = [part.to_dense() + decay * own for part, own, decay in terms]
        return self._scaled(found)

    def _scaled(self, vectors: list[Tensor]) -> list[Tensor]:
        scaling = self.limit.scaling
        if not scaling:
            return vectors
        return [part.to_dense() * own for part, own in zip(vectors, scaling, strict=True)]
