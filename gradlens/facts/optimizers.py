"""What an optimizer consists of, and the steps that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.facts.parameters import own_gradients, some_elements, unscaled_norm
from gradlens.graph.hooks import OptimizerFollower
from gradlens.graph.scaler import GradientScale
from gradlens.graph.torch_private import version
from gradlens.history.setup import ParameterGroup


def groups(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[ParameterGroup, ...]:
    """The parameter groups; ``names`` are those of parameters by ``id``."""
    return tuple(
        ParameterGroup(_options(group), tuple(names.get(id(p), "") for p in group["params"]))
        for group in optimizer.param_groups
    )


def _options(group: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in group.items():
        if name in OF_SCHEDULES or value is None:
            continue
        if name == "betas":
            found |= {"beta1": float(value[0]), "beta2": float(value[1])}
        elif isinstance(value, (bool, int, float)):
            found[name] = float(value)
    return found


OF_SCHEDULES = frozenset({"lr", "initial_lr", "params", "max_lr", "min_lr", "max_momentum"})
"""Entries of a group that change from step to step, or are no options."""


def learning_rate(optimizer: Optimizer) -> float:
    """The largest learning rate of all groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)


@torch.no_grad()
def second_moments(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Columns of the layers' table: the median of √v, by which Adam and its like divide."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        moment = optimizer.state.get(parameter, {}).get("exp_avg_sq")
        if isinstance(moment, Tensor) and moment.shape == parameter.shape:
            found[f"root_second_moment/{name}"] = some_elements(moment).float().sqrt().median()
    return found


class OptimizerSteps(OptimizerFollower):
    """Counts an optimizer's steps, and finds the norm of the gradients that they begin with.

    The norm is computed only if the gradients have changed since the backward pass, as by clipping.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int] = []
        self._needs_norm = False
        self._scale = GradientScale()
        self.count = 0
        self.norm: Tensor | None = None

    def begin(self, needs_norm: bool, scale: GradientScale) -> None:
        """The backward pass is over, and the optimizer's step comes next."""
        self._scale = scale
        self.count, self.norm = 0, None
        self._needs_norm = needs_norm
        self._versions = self._present_versions() if needs_norm else []

    def before_step(self) -> None:
        """Count it; the norm stays unknown if it can't be computed."""
        self.count += 1
        if self._needs_norm and self.count == 1 and self._versions != self._present_versions():
            gradients = own_gradients(self._parameters)
            self.norm = unscaled_norm(gradients, self._scale.of(self._parameters))

    def _present_versions(self) -> list[int]:
        return [version(gradient) for gradient in own_gradients(self._parameters).values()]
