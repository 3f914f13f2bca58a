"""The size of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.step import Step
from gradlens.view import View


class GradNorm(SingleStepQuantity):
    """‖p.grad‖₂ of each parameter by name: the gradient that the optimizer is about to see."""

    view = View("Gradient norm", group="step size", yscale="log", label="‖∇L‖")

    def compute(self, step: Step) -> dict[str, Tensor]:
        return {name: _norm(gradient) for name, gradient in step.gradients().items()}


def _norm(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(gradient, dtype=torch.float32 if half else None)
