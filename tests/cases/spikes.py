"""Training loops in which one step's batch, or the network, is damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

import gradlens
from gradlens.quantities import Quantity
from tests.cases.steps import tracked_backward

SAMPLES, STEPS, AT, BAD = 32, 60, 40, 7
"""Batch size, steps, the step that is damaged, and the place of the bad sample in its batch."""

Damage: TypeAlias = Callable[[Tensor, Tensor, nn.Module], None]
"""Changes inputs, targets or the network in place."""


@dataclass
class Problem:
    """A network with a loss, and data from which batches are drawn with numbers as ids."""

    network: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor


def classification() -> Problem:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
    inputs = torch.randn(512, 20)
    return Problem(network, nn.CrossEntropyLoss(), inputs, inputs[:, :4].argmax(1))


def images() -> Problem:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 4)
    )
    inputs = torch.randn(512, 1, 6, 6)
    return Problem(network, nn.CrossEntropyLoss(), inputs, inputs.flatten(1)[:, :4].argmax(1))


def regression() -> Problem:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))
    inputs = torch.randn(512, 20)
    return Problem(network, nn.MSELoss(), inputs, inputs[:, :2].sin())


def outlier(inputs: Tensor, targets: Tensor, network: nn.Module) -> None:
    inputs[BAD] *= -100


def bad_batch(inputs: Tensor, targets: Tensor, network: nn.Module) -> None:
    inputs *= -30


def bad_target(inputs: Tensor, targets: Tensor, network: nn.Module) -> None:
    targets[BAD] = 300


def nan_input(inputs: Tensor, targets: Tensor, network: nn.Module) -> None:
    inputs[BAD].view(-1)[3] = torch.nan


def nan_target(inputs: Tensor, targets: Tensor, network: nn.Module) -> None:
    targets[BAD, 1] = torch.nan


def nan_weight(inputs: Tensor, targets: Tensor, network: nn.Module) -> None:
    with torch.no_grad():
        [*network.parameters()][-2][0, 0] = torch.nan


@dataclass
class Outcome:
    """What a loop has recorded and left."""

    cockpit: gradlens.Cockpit | None
    weights: list[Tensor]
    losses: list[float]
    bad_id: int


def train(
    problem: Problem,
    damage: Damage | None = None,
    quantities: Sequence[Quantity] | None = (),
    steps: int = STEPS,
    at: int = AT,
    run: Path | None = None,
    rate: Callable[[int], float] = lambda step: 0.1,
    with_ids: bool = True,
    optimizer: Callable[[Any], Optimizer] = lambda parameters: SGD(parameters, lr=0.1),
    **options: Any,
) -> Outcome:
    """Train; without a cockpit if ``quantities`` is ``None``."""
    network = problem.network
    cockpit = None
    if quantities is not None:
        cockpit = gradlens.Cockpit(network, quantities, run=run, **options)
    optimize = optimizer(network.parameters())
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    bad_id = -1
    for step in range(steps):
        drawn = torch.randperm(512, generator=generator)[:SAMPLES]
        inputs, targets = problem.inputs[drawn].clone(), problem.targets[drawn].clone()
        if step == at and damage is not None:
            damage(inputs, targets, network)
            bad_id = int(drawn[BAD])
        for group in optimize.param_groups:
            group["lr"] = rate(step)
        loss = problem.loss(network(inputs), targets)
        optimize.zero_grad()
        info = {"ids": drawn} if with_ids else {}
        tracked_backward(cockpit, step, loss, optimizer=optimize, info=info)
        optimize.step()
        losses.append(float(loss.detach()))
    if cockpit is not None:
        cockpit.close()
    return Outcome(cockpit, [p.detach().clone() for p in network.parameters()], losses, bad_id)


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose losses of single samples can't be read off one node."""
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)
