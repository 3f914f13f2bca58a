"""Large parameters are copied when a context is left, and updates are the same as of small ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from gradlens import Cockpit, quantities
from gradlens.cockpit import updates

STEPS = 4


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "LARGE", 0)


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
def test_updates(
    way: Callable[..., None], kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    cockpit, states, _ = train(way, kind)
    first = 1 if way is decayed_inside else 0
    for step in range(first, STEPS):
        for name, before in states[step].items():
            size = (states[step + 1][name] - before).norm().item()
            found = cockpit.history["UpdateSize"][step][name]
            assert found == pytest.approx(size, rel=1e-12)
    monkeypatch.setattr(updates, "LARGE", 2**40)
    expected, *_ = train(way, kind)
    for step in range(first, STEPS - 1):
        alpha = expected.history["Alpha"][step]
        assert cockpit.history["Alpha"][step] == pytest.approx(alpha, rel=1e-9, nan_ok=True)


def test_a_change_inside_the_context_is_noticed() -> None:
    cockpit, *_ = train(decayed_inside)
    first = cockpit.history["UpdateSize"][0]
    assert math.isnan(first)
    assert "were changed inside the context" in first.reason


def test_no_hook_is_left_on_the_optimizer() -> None:
    def interrupted(context: Any, loss: torch.Tensor, *_: object) -> None:
        with pytest.raises(ZeroDivisionError), context:
            loss.backward()
            raise ZeroDivisionError

    for way in (after_the_context, interrupted):
        _, _, optimizer = train(way)
        assert not optimizer._optimizer_step_pre_hooks


def test_nothing_is_copied_before_the_context_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[updates.StartPoint] = []
    enter = updates.StartPoint.__init__

    def keep(self: updates.StartPoint, *arguments: Any) -> None:
        enter(self, *arguments)
        starts.append(self)

    def observed(context: Any, loss: torch.Tensor, optimizer: Optimizer, _: nn.Module) -> None:
        with context:
            loss.backward()
            assert starts[-1]._copies is None
        assert starts[-1]._copies is not None
        optimizer.step()

    monkeypatch.setattr(updates.StartPoint, "__init__", keep)
    train(observed)
