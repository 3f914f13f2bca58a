"""The loss, the time, and the sizes of parameters, gradients and updates."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.norms import distances, norms
from gradlens.numerics.shards import whole
from gradlens.numerics.tensors import accumulable, together
from gradlens.quantities.quantity import (
    Needed,
    Phase,
    Quantity,
    SingleStepQuantity,
    UpdateQuantity,
)
from gradlens.quantities.step import REMOVED, Measure, Step, all_explained, explained
from gradlens.quantities.update import Update


def _loss(step: Step) -> Tensor:
    assert step.loss is not None  # the cockpit has checked `needs`
    return step.loss.detach()


class Loss(SingleStepQuantity):
    """The mini-batch loss as it was passed to the context; a sum loss isn't divided by N."""

    needs = ("loss",)
    measures = (_loss,)
    view = View("Loss", group="performance", label="loss")

    def compute(self, step: Step) -> float:
        found: float = explained(step.measured(_loss).item(), "the loss")
        return found


class Time(SingleStepQuantity):
    """Time after the step's backward pass, in seconds since the epoch (``time.time()``)."""

    view = View("Time per step", group="performance", label="seconds")

    def compute(self, step: Step) -> float:
        return time.time()


class Parameters(SingleStepQuantity):
    """All trainable parameters by name, before the update; meant for small networks."""

    view = View("RMS of parameters", group="layers")

    def compute(self, step: Step) -> dict[str, Tensor]:
        return {name: whole(parameter.detach()) for name, parameter in step.parameters.items()}


def gradient_norms(step: Step) -> tuple[tuple[str, ...], Tensor]:
    """‖p.grad‖₂ by name, as a measure."""
    gradients = step.gradients()
    return together(dict(zip(gradients, norms([*gradients.values()]), strict=True)))


class GradNorm(SingleStepQuantity):
    """‖p.grad‖₂ of each parameter by name, as it is when the context is left.

    With a sum loss, it is N times that of the mean loss.
    """

    measures = (gradient_norms,)
    view = View("Gradient norm", group="step size", yscale="log", label="‖∇L‖")

    def compute(self, step: Step) -> dict[str, float]:
        names, sizes = step.measured(gradient_norms)
        return all_explained(dict(zip(names, sizes.tolist(), strict=True)), "the gradient of")


class ClippedGradNorm(Quantity):
    """‖p.grad‖₂ of each parameter by name, as the optimizer takes it: after clipping.

    At steps that aren't clipped between the end of the context and the optimizer's step, norms are
    those of ``GradNorm``, and it is a NaN with this reason. At steps with a value, gradients were
    changed there.
    What the optimizer itself makes of ``p.grad`` doesn't count, such as NovoGrad, which normalises
    it in place.
    """

    phases = (Phase.AFTER_BACKWARD, Phase.BEFORE_OPTIMIZER)
    needs: Sequence[Needed] = ("optimizer",)
    measures = (gradient_norms,)
    view = View("Gradient clipping", group="step size", yscale="log", label="‖∇L‖")

    def after_backward(self, step: Step, earlier: Any) -> dict[str, float]:
        names, sizes = step.measured(gradient_norms)
        return dict(zip(names, sizes.tolist(), strict=True))

    def before_optimizer(self, step: Step, earlier: Any) -> dict[str, float] | Undefined:
        names, sizes = step.measured(gradient_norms)
        found = dict(zip(names, sizes.tolist(), strict=True))
        if found.keys() == earlier.keys() and all(map(_equal, found.values(), earlier.values())):
            return Undefined(
                "not clipped after the context: the optimizer takes the gradient as it was there"
            )
        return all_explained(found, "the gradient of")


def _equal(one: float, other: float) -> bool:
    """Whether two norms are the same up to rounding in single precision, or both NaN."""
    return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))


class Distance(SingleStepQuantity):
    """‖p − p₀‖₂ of each parameter by name; p₀ is its value when the first context was entered.

    If a run continues from a checkpoint without the cockpit's state, p₀ is the value there.
    """

    state = ("start",)
    view = View("Distance from the start", group="step size", label="‖θ − θ₀‖")

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._start = {name: p.detach().clone() for name, p in parameters.items()}

    @property
    def measures(self) -> Sequence[Measure]:  # type: ignore[override]
        return (self._distances,)

    def _distances(self, step: Step) -> tuple[tuple[str, ...], Tensor]:
        self._start = {n: p.to(step.parameters[n].device) for n, p in self._start.items()}
        present = {n: p for n, p in step.parameters.items() if n not in step.removed}
        moved = [accumulable(parameter) for parameter in present.values()]
        sizes = distances(moved, [self._start[name] for name in present])
        return together(dict(zip(present, sizes, strict=True)))

    def compute(self, step: Step) -> dict[str, float]:
        names, sizes = step.measured(self._distances)
        found = all_explained(dict(zip(names, sizes.tolist(), strict=True)), "the parameter")
        return {name: found.get(name, Undefined(REMOVED)) for name in step.parameters}


class UpdateSize(UpdateQuantity):
    """‖pₙ₊₁ − pₙ‖₂ of each parameter by name, for any optimizer."""

    view = View("Update size", group="step size", yscale="log", label="‖θₙ₊₁ − θₙ‖")

    def compute(self, step: Step, update: Update) -> dict[str, float]:
        removed = dict.fromkeys(step.removed, Undefined(REMOVED))
        return all_explained({**update.norms, **removed}, "the update of")
