"""The norm of the gradient."""

from __future__ import annotations

from torch import Tensor

from gradlens.history.view import View
from gradlens.numerics.norms import norm
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step


class GradNorm(SingleStepQuantity):
    """‖p.grad‖₂ of each parameter by name: the gradient of which the optimizer makes its step."""

    view = View("Gradient norm", group="step size", yscale="log", label="‖∇L‖")

    def compute(self, step: Step) -> dict[str, Tensor]:
        return {name: norm(gradient) for name, gradient in step.gradients().items()}
