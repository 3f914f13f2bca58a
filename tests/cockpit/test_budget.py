"""Tracking within a share of the training time, by a clock of the tests' own."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import nn

import gradlens
from gradlens.cockpit.budget import Budget
from gradlens.quantities import Alpha, GradNorm, HessTrace, Loss, NormTest, Quantity
from gradlens.schedules import linear

STEPS = 500


class Clock:
    """Time passes when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(
    share: float,
    costs: dict[str, float],
    noise: float = 0.0,
    interval: int = 1,
    ahead: bool = False,
    kinds: dict[str, type[Quantity]] | None = None,
    afterwards: float = 0.0,
    pause: float = 0.0,
    context: float = 0.0,
) -> tuple[float, Counter[str]]:
    """Share of the time that tracking took, and how often each quantity was tracked.

    ``ahead`` asks about a step before the one before has been paid for; ``afterwards`` is by how
    much the three steps after a tracked one are slower, ``pause`` comes after each 50th step,
    ``context`` is what entering and leaving takes at each.
    """
    clock, draws = Clock(), random.Random(0)
    kinds = dict.fromkeys(costs, Loss) | (kinds or {})
    tracked = [kinds[name](linear(interval), name=name) for name in costs]
    budget = Budget(share, tracked, clock)
    count: Counter[str] = Counter()
    spent, slow = 0.0, 0
    for step in range(STEPS):
        budget.begin_step(step)
        active = [quantity.name for quantity in tracked if quantity.should_compute(step)]
        count.update(active)
        cost = sum(costs[name] for name in active) + (afterwards if slow else 0)
        slow = 3 if active else max(slow - 1, 0)
        spent += cost + context
        clock.now += context / 2
        budget.begin_backward()
        clock.now += max(1 + cost + draws.gauss(0, noise), 0.1) - 0.5
        budget.end_backward()
        clock.now += context / 2
        budget.end_step()
        clock.now += 0.5 + (pause if step % 50 == 0 else 0)
        if ahead:
            for quantity in tracked:
                quantity.should_compute(step + 1)
    return spent / clock.now, count


COSTS = {
    "cheap": {"a": 0.02, "b": 0.01},
    "expensive": {"a": 2.0, "b": 0.5, "c": 0.1},
    "all alike": dict.fromkeys("abcdef", 0.5),
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_the_share_is_kept(
    costs: dict[str, float], share: float, noise: float, ahead: bool
) -> None:
    found, count = simulate(share, costs, noise, ahead=ahead)
    assert found <= share + 0.01
    assert set(count) == set(costs)
    wanted = sum(costs.values())
    # Some steps are left untracked whatever tracking costs, or it wouldn't be known.
    assert found >= 0.5 * min(share, wanted / (1 + wanted))


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_that_tracking_slows_down_are_paid_for(ahead: bool) -> None:
    found, count = simulate(0.05, {"a": 0.3, "b": 0.1}, afterwards=0.2, ahead=ahead)
    assert 0.03 <= found <= 0.06
    assert count["a"] == count["b"]


@pytest.mark.parametrize("context", [0.02, 0.08])
def test_contexts_of_untracked_steps_are_paid_for(context: float) -> None:
    found, count = simulate(0.05, {"a": 0.3, "b": 0.1}, context=context)
    assert found <= max(0.06, context)
    assert bool(count) == (context < 0.05)


def test_a_validation_is_nobodys_cost() -> None:
    costs = {"a": 0.3, "b": 0.1}
    _, count = simulate(0.05, costs)
    _, interrupted = simulate(0.05, costs, pause=100.0)
    # Its time is part of the training time.
    assert interrupted["a"] >= count["a"] > 0


def test_steps_that_never_come() -> None:
    """Somebody asks about them, and who is chosen there need not pay."""
    clock = Clock()
    tracked = [Loss(name=name) for name in "ab"]
    budget = Budget(0.2, tracked, clock)
    count = 0
    for step in range(0, 2 * STEPS, 2):
        budget.begin_step(step)
        active = [quantity for quantity in tracked if quantity.should_compute(step)]
        count += len(active)
        budget.begin_backward()
        clock.now += 1 + 0.1 * len(active)
        budget.end_backward()
        budget.end_step()
        for quantity in tracked:
            quantity.should_compute(step + 1)
    assert count > 100


@pytest.mark.parametrize("ahead", [False, True])
def test_fair_between_kinds(ahead: bool) -> None:
    """Those of a kind share their work, and are tracked together."""
    costs = {"a": 2.0, "b": 0.5, "c": 0.25}
    kinds: dict[str, type[Quantity]] = {"a": HessTrace, "b": NormTest}
    _, count = simulate(0.1, costs, ahead=ahead, kinds=kinds)
    spent = [costs[name] * count[name] for name in costs]
    assert max(spent) <= 1.5 * min(spent)
    _, count = simulate(0.1, costs, ahead=ahead)
    assert count["a"] == count["b"] == count["c"]


def test_the_schedule_stays_in_force() -> None:
    _, count = simulate(0.5, {"a": 0.01}, interval=10)
    assert 35 <= count["a"] <= 50


@pytest.mark.parametrize("share", [0, 1, -0.1, 2])
def test_no_share(share: float) -> None:
    with pytest.raises(ValueError, match="such as"):
        gradlens.Cockpit(nn.Linear(2, 2), budget=share)


def test_a_run() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
    tracked = [Loss(), GradNorm(), NormTest(), Alpha()]
    own = [quantity.track_schedule for quantity in tracked]
    cockpit = gradlens.Cockpit(model, tracked, budget=0.1)
    loss_function = gradlens.extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(64, 300), torch.randint(10, (64,))
    for step in range(300):
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    cockpit.close()
    assert all(len(cockpit.history[quantity.name]) > 0 for quantity in tracked)
    assert len(cockpit.history["NormTest"]) < 285
    assert [quantity.track_schedule for quantity in tracked] == own
