"""The norm of the gradient."""

from __future__ import annotations

from torch import Tensor

from gradlens.history.view import View
from gradlens.numerics.host import together
from gradlens.numerics.norms import norms
from gradlens.quantities.explained import all_explained
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step


def _norms(step: Step) -> tuple[tuple[str, ...], Tensor]:
    gradients = step.gradients()
    return together(dict(zip(gradients, norms([*gradients.values()]), strict=True)))


class GradNorm(SingleStepQuantity):
    """‖p.grad‖₂ of each parameter by name, as it is when the context is left.

    With a sum loss, it is N times that of the mean loss.
    """

    measures = (_norms,)
    view = View("Gradient norm", group="step size", yscale="log", label="‖∇L‖")

    def compute(self, step: Step) -> dict[str, float]:
        names, sizes = step.measured(_norms)
        return all_explained(dict(zip(names, sizes.tolist(), strict=True)), "the gradient of")
