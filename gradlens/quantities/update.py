"""The parameter update between two steps, and which parameters an optimizer updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradlens.history.coverage import few


@dataclass(frozen=True)
class Update:
    """The parameter update d = pₙ₊₁ − pₙ that followed a tracked step.

    ``direction`` is d ``[*P]`` and ``norms`` are ‖d‖₂ by parameter name. ``projections`` are
    ⟨gₙ, d⟩ ``[N]`` at the start point, and ``end_projections`` those at the end point with the next
    step's batch, summed over the covered parameters and in float64 on the host. They are ``None``
    unless a quantity retains gradients.
    ``without_projections`` is a reason why there are none. ``start_norms`` are ‖pₙ‖₂, and empty
    unless a quantity is relative to them. ``start`` are copies of pₙ, and empty unless a quantity
    returns there. ``of_all`` makes a list of all processes' values of this one's, which are plain.
    """

    direction: Mapping[str, Tensor]
    norms: Mapping[str, float]
    projections: Tensor | None = None
    end_projections: Tensor | None = None
    without_projections: str = ""
    start_norms: Mapping[str, float] = field(default_factory=dict)
    start: Mapping[str, Tensor] = field(default_factory=dict)
    of_all: Callable[[Any], list[Any]] = lambda own: [own]

    def norm(self) -> float:
        """‖d‖₂ of all parameters together."""
        return math.hypot(*self.norms.values())


def not_held(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters that need a gradient and that an optimizer doesn't have."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]


def why_not_held(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> str:
    """Why an optimizer's settings aren't those of all parameters; empty if they are."""
    names = not_held(optimizer, parameters)
    return OF_SOME.format(names=few(names)) if names else ""


OF_SOME = (
    "the optimizer that was passed doesn't have {names}: where others do, there is no learning "
    "rate of all parameters"
)
