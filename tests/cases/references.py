"""Slow and plain computations to compare with, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

Contribution = Callable[[Tensor, slice], Tensor]
"""``(output of some samples, which ones)`` to their share of the batch loss, a scalar."""


def per_sample_gradients_by_loop(
    model: nn.Module, inputs: Tensor, contribution: Contribution, scale: float
) -> dict[str, Tensor]:
    """gₙ ``[N, *P]``, sample by sample through the whole network, on a copy without hooks."""
    model = without_hooks(model)
    parameters = dict(model.named_parameters())
    gradients: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for n in range(len(inputs)):
        share = contribution(model(inputs[n : n + 1]), slice(n, n + 1))
        found = torch.autograd.grad(share, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True):
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            gradients[name].append(scale * gradient)
    return {name: torch.stack(rows) for name, rows in gradients.items()}


def per_sample_gradients_of_losses(losses: Iterable[Tensor], model: nn.Module) -> dict[str, Tensor]:
    """gₙ ``[N, *P]`` of losses ``[N]`` that depend on one sample each, from their own graph."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for loss in losses:
        found = torch.autograd.grad(
            loss, list(parameters.values()), retain_graph=True, materialize_grads=True
        )
        for name, gradient in zip(parameters, found, strict=True):
            rows[name].append(gradient)
    return {name: torch.stack(gradients) for name, gradients in rows.items()}


def without_hooks(model: nn.Module) -> nn.Module:
    clone = copy.deepcopy(model)
    for module in clone.modules():
        module._forward_hooks.clear()
        module._forward_hooks_with_kwargs.clear()
    return clone


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """``[N, D]``."""
    return torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)


def squared_error(target: Tensor, reduction: str) -> Contribution:
    """Each sample's share of the mean or sum over samples of the mean squared error."""

    def contribution(output: Tensor, samples: slice) -> Tensor:
        losses = (output - target[samples]).square().flatten(1).mean(1)
        return losses.sum() / (len(target) if reduction == "mean" else 1)

    return contribution


def expected_statistics(values: Sequence[float]) -> dict[str, float]:
    """The statistics of ``gradlens.Aggregate``, all numbers at once."""
    q1, median, q3 = np.quantile(values, [0.25, 0.5, 0.75])
    return {
        "mean": np.mean(values), "std": np.std(values), "min": min(values), "q1": q1,
        "median": median, "q3": q3, "max": max(values), "iqr": q3 - q1, "count": len(values),
    }  # fmt: skip
