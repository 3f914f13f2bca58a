"""Whether individual gradients add up to the gradient that autograd has found.

They don't where the loss has a term that isn't a sum over samples (a regulariser), or where a
parameter is used outside its layers. That they do proves little: layers that normalise over the
batch pass as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlens.individual.reductions import ParameterGradients, Reduction

ROUNDING = 100
"""Rounding errors of a gradient, in units of the relative rounding error of all gradients."""


@dataclass(frozen=True)
class Discrepancy(Reduction):
    """‖Σₙcₙ − p.grad‖, and the larger of ‖p.grad‖ and √Σₙ‖cₙ‖²: a pair ``[2]``.

    cₙ are the samples' contributions to the batch gradient. ``None`` where the gradient of this
    backward pass alone isn't known.
    """

    def reduce(self, gradients: ParameterGradients) -> Tensor | None:
        if gradients.gradient is None:
            return None
        individual, gradient = (
            gradients.individual,
            gradients.gradient.to(gradients.individual.dtype),
        )
        difference = torch.linalg.vector_norm(individual.sum() / individual.scale - gradient)
        spread = individual.squared_norms().sum().sqrt() / individual.scale
        size = torch.maximum(torch.linalg.vector_norm(gradient), spread)
        return torch.stack([difference, size])


def inconsistent(
    discrepancies: Mapping[str, Tensor | None], epsilon: float
) -> tuple[str, ...] | None:
    """Names of the parameters whose gradients don't add up; ``None`` if that can't be told.

    ``epsilon`` is the relative rounding error of the least precise number involved. A gradient that
    is zero but for rounding, such as that of attention's key bias, is judged by the size of all.
    """
    known = {name: value.tolist() for name, value in discrepancies.items() if value is not None}
    everything = math.hypot(*(size for _, size in known.values()))
    noise = ROUNDING * epsilon * everything
    wrong = tuple(
        name
        for name, (difference, size) in known.items()
        if difference > math.sqrt(epsilon) * size and difference > noise
    )
    unknown = len(known) < len(discrepancies) or not everything > 0
    return None if unknown and not wrong else wrong


def remark_on(wrong: Sequence[str]) -> str:
    """What to tell the user about parameters whose gradients don't add up."""
    return (
        f"the samples' gradients don't add up to p.grad of {', '.join(wrong)}: the loss has a term "
        "that isn't a sum over samples (a regulariser), or the parameter is used outside its "
        "layers. Quantities describe the part that comes from the samples"
    )
