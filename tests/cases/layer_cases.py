"""Small networks, and what flows through their layers, found without hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.cases.references import without_hooks

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Flow:
    """What flows through one layer at one step, with features last: ``[N, S, F]``."""

    module: nn.Module
    input: Array
    output: Array
    output_gradient: Array
    input_gradient: Array | None


@dataclass(frozen=True)
class Case:
    """A chain of layers, a batch of n samples, and which axis of each has the features."""

    build: Callable[[], nn.Sequential]
    inputs: Callable[[int], Tensor]
    channel_last: bool


def linear() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 12, bias=False),
        nn.ReLU(inplace=True),
        nn.Linear(12, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
    )


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 3, 2),
        nn.ELU(inplace=True),
    )


def sequential() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 5, bias=False), nn.Sigmoid()
    )


CASES = {
    "linear": Case(linear, lambda n: torch.randn(n, 5).double(), True),
    "convolutional": Case(convolutional, lambda n: torch.randn(n, 2, 6, 5).double(), False),
    "sequence": Case(sequential, lambda n: torch.randn(n, 7, 6).double(), True),
}


def flows(model: nn.Sequential, inputs: Tensor, channel_last: bool) -> dict[str, Flow]:
    """One forward and backward pass of ``square().mean()``, layer by layer on a copy."""
    copied = without_hooks(copy.deepcopy(model))
    steps = [inputs]
    for layer in copied:
        # An alias of its own, because the layer may work in place.
        given = steps[-1].clone()
        steps.append(layer(given))
        if steps[-1].requires_grad:
            steps[-1] = steps[-1].clone()
            steps[-1].retain_grad()
    steps[-1].square().mean().backward()
    rows = [_rows(step.detach(), channel_last) for step in steps]
    gradients = [None if s.grad is None else _rows(s.grad, channel_last) for s in steps]
    found = {}
    for place, (name, layer) in enumerate(copied.named_children()):
        at_output = gradients[place + 1]
        assert at_output is not None
        found[name] = Flow(layer, rows[place], rows[place + 1], at_output, gradients[place])
    return found


def _rows(tensor: Tensor, channel_last: bool) -> Array:
    if not channel_last and tensor.dim() > 2:
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(len(tensor), -1, tensor.shape[-1]).numpy()
