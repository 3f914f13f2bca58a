"""Updates are measured from where the parameters were when the context was entered."""

from __future__ import annotations

from copy import deepcopy

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


WAYS = [("", "step"), ("step", ""), ("", "decay step"), ("decay", "step")]
"""What is done in the context, behind the backward pass, and after it."""


def done(names: str, model: nn.Module, optimizer: Optimizer) -> None:
    for name in names.split():
        optimizer.step() if name == "step" else decay(model)


def train(
    inside: str, after: str, kind: type[Optimizer]
) -> tuple[Cockpit, list[dict[str, torch.Tensor]]]:
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
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
            done(inside, model, optimizer)
        done(after, model, optimizer)
    states.append(deepcopy(dict(model.named_parameters())))
    cockpit.close()
    return cockpit, states


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize(("inside", "after"), WAYS)
def test_updates(inside: str, after: str, kind: type[Optimizer]) -> None:
    cockpit, states = train(inside, after, kind)
    for step in range(STEPS):
        for name, before in states[step].items():
            size = (states[step + 1][name] - before).norm().item()
            found = cockpit.history["UpdateSize"][step][name]
            assert found == pytest.approx(size, rel=1e-12)
