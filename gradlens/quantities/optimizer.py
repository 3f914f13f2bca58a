"""What a step is worth, and the optimizer's settings: local step size, batch size, stability."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.eigenpairs import WarmStartedEigenpairs
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.probe import Probe
from gradlens.history.coverage import few
from gradlens.history.setup import descent_threshold
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import EQUAL, NOT_FINITE, ONE_SAMPLE
from gradlens.numerics.host import on_host
from gradlens.numerics.unavailable import UnavailableError
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

    For gradient descent with learning rate η, ``"sharpness"`` is the Hessian's largest eigenvalue
    and ``"threshold"`` is 2/η; with momentum β it is (2+2β)/η, with Nesterov's (2+2β)/(η(1+2β)),
    η being the learning rate times one minus the dampening (Cohen et al., 2021, arXiv:2103.00065).
    For Adam, sharpness is the largest eigenvalue of P⁻¹H with Adam's preconditioner P, and the
    threshold is (2+2β₁)/((1−β₁)η) (Cohen et al., 2022, arXiv:2207.14484). ``"ratio"`` is sharpness
    over threshold: above 1, the step is unstable. Where groups have other learning rates, η is the
    largest one, and the curvature of a parameter is multiplied by its own rate over η. Decoupled
    weight decay λ multiplies it by 1/(1 − ηλ/2), and coupled one is added to it. H is the Hessian
    of the mean loss. A step of η on
    a sum loss is equal to a step of Nη on the mean loss, so that η is multiplied by N, or P divided
    by N. The same holds for any other factor of the loss on which backward is called. If it isn't a
    multiple of the loss, for example because of a regulariser, values are NaN. For Adam, they are
    also NaN before its first step. ``tolerance`` and ``max_products`` are those of ``HessMaxEV``.

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
        limit = stability_limit(curvature.optimizer, curvature.parameters, factor)
        matrix: LinearOperator | CurvatureOperator = curvature.hessian
        if limit.scaling is not None or limit.decay is not None:
            matrix = _of_optimizer(curvature.hessian, limit)
        found = self._eigenpairs(matrix, curvature.seed)
        value = float(found.values[0]) if found.converged else Undefined(found.reason)
        return value, limit

    def compute(self, step: Step, earlier: tuple[float, StabilityLimit]) -> dict[str, float]:
        (sharpness, limit), weight = earlier, self._weight(step)
        threshold = limit.threshold
        if limit.decay is not None and weight != 1:
            raise UnavailableError(WITH_DECAY)
        if not limit.is_preconditioned:
            threshold /= weight
        elif not isinstance(sharpness, Undefined):
            sharpness *= weight
        ratio = sharpness if isinstance(sharpness, Undefined) else sharpness / threshold
        return {"sharpness": sharpness, "threshold": threshold, "ratio": ratio}

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

    ``scaling`` is the diagonal ``[D]`` of S, ``None`` if that is the identity; ``decay`` is the
    diagonal of Λ, the weight decay that the optimizer adds to gradients, ``None`` without any. If S
    ``is_preconditioned``, a factor of the loss is one of sharpness, and else one of the rate.
    """

    threshold: float
    is_preconditioned: bool = False
    scaling: Tensor | None = None
    decay: Tensor | None = None


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
    "backward was called on a multiple of the loss, and the optimizer adds weight decay to its "
    "gradients: pass that multiple to the context"
)
DECAY_ALONE = (
    "weight decay alone is unstable, since its product with the learning rate is 2 or more: lower "
    "one of them"
)
COMMON = ("momentum", "dampening", "nesterov", "betas", "eps")
"""Settings that are the same in all groups where a threshold is known."""


def stability_limit(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], loss_factor: float = 1
) -> StabilityLimit:
    """The limit at the optimizer's next step, which is on ``loss_factor`` times the mean loss.

    For a coordinate with curvature h, rate η, preconditioner p and decoupled decay λ, Adam's
    recursion has the characteristic polynomial z² − (1 − ηλ + β₁ − (1−β₁)ηh/p)z + β₁(1 − ηλ).
    A root leaves the unit circle, at −1, where ηh/(p(2 − ηλ)) exceeds (1+β₁)/(1−β₁).
    ``UnavailableError`` where no limit is known.
    """
    problem = why_not_held(optimizer, parameters)
    if problem:
        raise UnavailableError(problem)
    first, *others = optimizer.param_groups
    for key in COMMON:
        if any(other.get(key) != first.get(key) for other in others):
            raise UnavailableError(
                f"parameter groups with different {key} have no common threshold"
            )
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise UnavailableError("maximising is never stable on a quadratic with a minimum")
    rate = max(float(group["lr"]) for group in optimizer.param_groups)
    if type(optimizer) is SGD:
        momentum, dampening = float(first["momentum"]), float(first["dampening"])
        of_loss = descent_threshold(rate, momentum, dampening, bool(first["nesterov"]))
        threshold = of_loss / loss_factor
    elif type(optimizer) in (Adam, AdamW) and not first["amsgrad"]:
        momentum = first["betas"][0]
        threshold = descent_threshold(rate, momentum) / (1 - momentum)
    else:
        name = type(optimizer).__name__
        raise UnavailableError(f"no threshold is known for {name} as it is set up")
    scalings, decays = [], []
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for parameter in parameters.values():
        group = groups[id(parameter)]
        own, decay = float(group["lr"]), float(group["weight_decay"])
        is_decoupled = type(optimizer) is AdamW or bool(group.get("decoupled_weight_decay"))
        if is_decoupled and own * decay >= 2:
            raise UnavailableError(DECAY_ALONE)
        share = (own / rate if rate else 1.0) / (1 - own * decay / 2 if is_decoupled else 1.0)
        of_gradient = 0.0 if is_decoupled else decay / loss_factor
        inverse = _preconditioner(optimizer, group, parameter, loss_factor)
        scalings.append((share / inverse).sqrt().flatten())
        decays.append(torch.full_like(inverse, of_gradient).flatten())
    scaling, all_decays = torch.cat(scalings), torch.cat(decays)
    return StabilityLimit(
        threshold,
        type(optimizer) is not SGD,
        None if bool((scaling == 1).all()) else scaling,
        all_decays if bool(all_decays.any()) else None,
    )


def _preconditioner(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, loss_factor: float
) -> Tensor:
    """By what the optimizer divides a gradient, over ``loss_factor`` for Adam."""
    if type(optimizer) is SGD:
        return torch.ones_like(parameter, dtype=torch.float64)
    state = optimizer.state.get(parameter, {})
    if "exp_avg_sq" not in state:
        raise UnavailableError("Adam has no second moments before its first step")
    (first, second), steps = group["betas"], float(state["step"])
    root = (state["exp_avg_sq"].double() / (1 - second**steps)).sqrt() + group["eps"]
    return (1 - first**steps) * root / loss_factor


def _of_optimizer(hessian: CurvatureOperator, limit: StabilityLimit) -> LinearOperator:
    """S(H + Λ)S."""
    scaling, decay = (
        None if diagonal is None else diagonal.cpu().numpy()
        for diagonal in (limit.scaling, limit.decay)
    )

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled = vector.reshape(-1) if scaling is None else scaling * vector.reshape(-1)
        found = hessian.matvec(scaled)
        if decay is not None:
            found = found + decay * scaled
        return np.asarray(found if scaling is None else scaling * found, dtype=np.float64)

    return LinearOperator(hessian.shape, matvec=product, dtype=np.dtype(np.float64))
