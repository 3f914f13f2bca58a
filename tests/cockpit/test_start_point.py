"""Updates are measured from where the parameters were when the context was entered."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from gradlens import Cockpit, quantities

STEPS = 4


@torch.no_grad()
def decay(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def after_the_context(context: Any, loss: torch.Tensor, optimizer: Optimizer, _: nn.Module) -> None:
    with context:
        loss.backward()
    optimizer.step()


def inside(context: Any, loss: torch.Tensor, optimizer: Optimizer, _: nn.Module) -> None:
    with context:
        loss.backward()
        optimizer.step()


def decayed(context: Any, loss: torch.Tensor, optimizer: Optimizer, model: nn.Module) -> None:
    with context:
        loss.backward()
    decay(model)
    optimizer.step()


def decayed_inside(
    context: Any, loss: torch.Tensor, optimizer: Optimizer, model: nn.Module
) -> None:
    with context:
        loss.backward()
        decay(model)
    optimizer.step()


def train(
    way: Callable[..., None], kind: type[Optimizer] = SGD
) -> tuple[Cockpit, list[dict[str, torch.Tensor]], Optimizer]:
    """Trains, and returns the parameters before each step and after the last, by name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    loss_function, optimizer = nn.CrossEntropyLoss(), kind(model.parameters(), lr=0.1)
    tracked = [quantities.UpdateSize(), quantities.Alpha(), quantities.Distance()]
    cockpit = Cockpit(model, tracked, loss_function=loss_function)
    states = []
    for step in range(STEPS):
        states.append(deepcopy(dict(model.named_parameters())))
        inputs, labels = torch.randn(6, 4).double(), torch.randint(3, (6,))
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        way(cockpit(step, loss=loss, optimizer=optimizer), loss, optimizer, model)
    states.append(deepcopy(dict(model.named_parameters())))
    cockpit.close()
    return cockpit, states, optimizer


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("way", [after_the_context, inside, decayed, decayed_inside])
def test_updates(way: Callable[..., None], kind: type[Optimizer]) -> None:
    cockpit, states, _ = train(way, kind)
    for step in range(STEPS):
        for name, before in states[step].items():
            size = (states[step + 1][name] - before).norm().item()
            found = cockpit.history["UpdateSize"][step][name]
            assert found == pytest.approx(size, rel=1e-12)
