"""Whether individual gradients add up to the gradient that autograd has found.

They don't where the loss has a term that isn't a sum over samples (a regulariser), or where a
parameter is used outside its layers. That they do proves little: layers that normalise over the
batch pass as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlens.individual.reductions import ParameterGradients, Reduction


@dataclass(frozen=True)
class Discrepancy(Reduction):
    """‖Σₙcₙ − p.grad‖ over the larger of ‖p.grad‖ and √Σₙ‖cₙ‖², in units of the rounding allowed.

    cₙ are the samples' contributions to the batch gradient. ``None`` where the gradient of this
    backward pass alone isn't known.
    """

    def reduce(self, gradients: ParameterGradients) -> Tensor | None:
        if gradients.gradient is None:
            return None
        individual, gradient = gradients.individual, gradients.gradient.to(gradients.mean.dtype)
        difference = torch.linalg.vector_norm(individual.sum() / individual.scale - gradient)
        spread = individual.squared_norms().sum().sqrt() / individual.scale
        size = torch.maximum(torch.linalg.vector_norm(gradient), spread)
        allowed = math.sqrt(torch.finfo(gradients.gradient.dtype).eps)
        return difference / (size * allowed)


def inconsistencies(discrepancies: Mapping[str, Tensor | None]) -> str:
    """What to tell the user; empty if nothing is wrong."""
    excess = {name: float(value) for name, value in discrepancies.items() if value is not None}
    wrong = [name for name, value in excess.items() if value > 1]
    if not wrong:
        return ""
    return (
        f"the samples' gradients don't add up to p.grad of {', '.join(wrong)}: the loss has a term "
        "that isn't a sum over samples (a regulariser), or the parameter is used outside its "
        "layers. Quantities describe the part that comes from the samples"
    )
