"""Whether an optimizer updates all parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from gradlens.history.coverage import few


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
