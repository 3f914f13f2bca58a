"""Sharpness and the stability threshold of the optimizer."""

from __future__ import annotations

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
from gradlens.history.setup import descent_threshold
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.kinds import GradientCurvatureQuantity
from gradlens.quantities.step import Step
from gradlens.quantities.update import why_not_held


@dataclass(eq=False)
class Stability(GradientCurvatureQuantity):
    """Sharpness, and the threshold above which the optimizer is unstable on a quadratic.

    For gradient descent with learning rate η, ``"sharpness"`` is the Hessian's largest eigenvalue
    and ``"threshold"`` is 2/η; with momentum β it is (2+2β)/η, with Nesterov's (2+2β)/(η(1+2β)),
    η being the learning rate times one minus the dampening (Cohen et al., 2021, arXiv:2103.00065).
    For Adam, sharpness is the largest eigenvalue of P⁻¹H with Adam's preconditioner P, and the
    threshold is (2+2β₁)/((1−β₁)η) (Cohen et al., 2022, arXiv:2207.14484). ``"ratio"`` is sharpness
    over threshold: above 1, the step is unstable. H is the Hessian of the mean loss. A step of η on
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
        if limit.scaling is not None:
            matrix = _rescaled(curvature.hessian, limit.scaling)
        found = self._eigenpairs(matrix, curvature.seed)
        value = float(found.values[0]) if found.converged else Undefined(found.reason)
        return value, limit

    def compute(self, step: Step, earlier: tuple[float, StabilityLimit]) -> dict[str, float]:
        (sharpness, limit), weight = earlier, self._weight(step)
        threshold = limit.threshold
        if limit.scaling is None:
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
    """An optimizer is stable if the largest eigenvalue of SHS is below ``threshold``.

    ``scaling`` is the diagonal ``[D]`` of S = P^(−1/2); ``None`` if S is the identity.
    """

    threshold: float
    scaling: Tensor | None = None


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


def stability_limit(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], loss_factor: float = 1
) -> StabilityLimit:
    """The limit at the optimizer's next step, which is on ``loss_factor`` times the mean loss.

    ``UnavailableError`` where none is known.
    """
    problem = why_not_held(optimizer, parameters)
    if problem:
        raise UnavailableError(problem)
    group, *others = optimizer.param_groups
    keys = ("lr", "momentum", "dampening", "nesterov", "betas", "eps")
    if any(other.get(key) != group.get(key) for other in others for key in keys):
        raise UnavailableError("parameter groups with different settings have no common threshold")
    if any(each.get("weight_decay") for each in optimizer.param_groups):
        raise UnavailableError("weight decay adds curvature that the loss doesn't have")
    if group.get("maximize"):
        raise UnavailableError("maximising is never stable on a quadratic with a minimum")
    if type(optimizer) is SGD:
        threshold = descent_threshold(
            float(group["lr"]),
            float(group["momentum"]),
            float(group["dampening"]),
            bool(group["nesterov"]),
        )
        return StabilityLimit(threshold / loss_factor)
    if type(optimizer) in (Adam, AdamW) and not group["amsgrad"]:
        return _adam_limit(optimizer, group, parameters, loss_factor)
    raise UnavailableError(f"no threshold is known for {type(optimizer).__name__} as it is set up")


def _adam_limit(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    loss_factor: float,
) -> StabilityLimit:
    first, second = group["betas"]
    roots = []
    for parameter in parameters.values():
        state = optimizer.state.get(parameter, {})
        if "exp_avg_sq" not in state:
            raise UnavailableError("Adam has no second moments before its first step")
        steps = float(state["step"])
        root = (state["exp_avg_sq"].double() / (1 - second**steps)).sqrt() + group["eps"]
        roots.append(((1 - first**steps) * root / loss_factor).flatten())
    threshold = (2 + 2 * first) / ((1 - first) * float(group["lr"]))
    return StabilityLimit(threshold, torch.cat(roots).rsqrt())


def _rescaled(hessian: CurvatureOperator, scaling: Tensor) -> LinearOperator:
    diagonal = scaling.cpu().numpy()

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        return diagonal * hessian.matvec(diagonal * vector.reshape(-1))

    return LinearOperator(hessian.shape, matvec=product, dtype=np.dtype(np.float64))
