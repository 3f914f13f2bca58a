"""The norm of the gradient."""

from __future__ import annotations

from gradlens.history.view import View
from gradlens.numerics.host import numbers
from gradlens.numerics.norms import norms
from gradlens.quantities.explained import explained
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step


class GradNorm(SingleStepQuantity):
    """‖p.grad‖₂ of each parameter by name, as it is when the context is left.

    With a sum loss, it is N times that of the mean loss.
    """

    view = View("Gradient norm", group="step size", yscale="log", label="‖∇L‖")

    def compute(self, step: Step) -> dict[str, float]:
        gradients = step.gradients()
        sizes = numbers(norms([*gradients.values()]))
        return {
            name: explained(size, f"the gradient of {name}")
            for name, size in zip(gradients, sizes, strict=True)
        }
