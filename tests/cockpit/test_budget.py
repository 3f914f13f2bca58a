"""Tracking within a share of the training time, by a clock of the tests' own."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradlens
from gradlens.cockpit.budget import Budget
from gradlens.quantities import (
    Alpha,
    GradHist1d,
    GradNorm,
    HessTrace,
    Loss,
    NormTest,
    Quantity,
    UpdateSize,
)
from gradlens.quantities.bin_adaptation import GradAbsMax
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.schedules import linear

STEPS = 500


class Clock:
    """Time passes when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(share: float, costs: dict[str, float], **options: Any) -> tuple[float, Counter[str]]:
    """Share of the time that tracking took, and how often each quantity was tracked."""
    taken, count, _ = simulated(share, costs, **options)
    return taken, count


def simulated(
    share: float,
    costs: dict[str, float],
    noise: float = 0.0,
    interval: int = 1,
    ahead: bool = False,
    kinds: dict[str, type[Quantity]] | None = None,
    afterwards: float = 0.0,
    pause: float = 0.0,
    context: float = 0.0,
    steps: int = STEPS,
) -> tuple[float, Counter[str], Budget]:
    """As ``simulate``, and the budget.

    ``ahead`` asks about a step before the one before has been paid for; ``afterwards`` is by how
    much the three steps after a tracked one are slower, ``pause`` comes after each 50th step,
    ``context`` is what entering and leaving takes at each.
    """
    clock, draws = Clock(), random.Random(0)
    kinds = dict.fromkeys(costs, UpdateSize) | (kinds or {})
    tracked = [kinds[name](linear(interval), name=name) for name in costs]
    budget = Budget(share, tracked, clock=clock)
    count: Counter[str] = Counter()
    spent, slow = 0.0, 0
    for step in range(steps):
        budget.begin_step(step)
        active = [quantity.name for quantity in tracked if budget.is_due(quantity, step)]
        count.update(active)
        cost = sum(costs[name] for name in active) + (afterwards if slow else 0)
        slow = 3 if active else max(slow - 1, 0)
        spent += cost + context
        clock.now += context / 2
        budget.begin_backward()
        clock.now += max(1 + cost + draws.gauss(0, noise), 0.1) - 0.5
        budget.end_backward(bool(active))
        clock.now += context / 2
        budget.end_step()
        clock.now += 0.5 + (pause if step % 50 == 0 else 0)
        if ahead:
            for quantity in tracked:
                budget.is_due(quantity, step + 1)
    return spent / clock.now, count, budget


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
    found, count = simulate(share, costs, noise=noise, ahead=ahead)
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
    tracked = [UpdateSize(name=name) for name in "ab"]
    budget = Budget(0.2, tracked, clock=clock)
    count = 0
    for step in range(0, 2 * STEPS, 2):
        budget.begin_step(step)
        active = [quantity for quantity in tracked if budget.is_due(quantity, step)]
        count += len(active)
        budget.begin_backward()
        clock.now += 1 + 0.1 * len(active)
        budget.end_backward(bool(active))
        budget.end_step()
        for quantity in tracked:
            budget.is_due(quantity, step + 1)
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


# What costs next to nothing --------------------------------------------------------------------


@dataclass(eq=False)
class Costly(SingleStepQuantity):
    """Takes so many seconds of a clock that stands still otherwise."""

    clock: Clock = field(default_factory=Clock)
    seconds: float = 0.0

    def compute(self, step: Step) -> float:
        self.clock.now += self.seconds
        return 0.0


def costly(
    seconds: Mapping[str, float],
    share: float,
    steps: int,
    interval: int = 1,
    path: Path | None = None,
) -> tuple[gradlens.Cockpit, dict[str, list[int]]]:
    """A run whose steps take a second, and the steps at which each quantity was tracked."""
    clock, model = Clock(), nn.Linear(2, 1)
    schedule = linear(interval)
    tracked = [Costly(schedule, name=n, clock=clock, seconds=s) for n, s in seconds.items()]
    cockpit = gradlens.Cockpit(model, tracked, budget=share, run=path)
    assert cockpit.budget is not None
    cockpit.budget.clock = clock
    for step in range(steps):
        with cockpit(step):
            model(torch.ones(3, 2)).sum().backward()
            clock.now += 1
    return cockpit, {name: [*cockpit.history[name]] for name in seconds}


def test_what_costs_next_to_nothing_is_tracked_at_every_step() -> None:
    _, found = costly({"a": 0.001, "b": 0.02, "c": 0.5}, 0.1, 200)
    assert found["a"] == found["b"] == [*range(200)]
    assert 10 <= len(found["c"]) <= 40


def test_what_costs_next_to_nothing_keeps_its_schedule() -> None:
    _, found = costly({"a": 0.001}, 0.05, 60, interval=20)
    assert found["a"] == [0, 20, 40]


def test_what_turns_out_to_be_expensive_is_thinned_at_once() -> None:
    _, found = costly({"a": 5.0, "b": 0.001}, 0.05, 30)
    assert found["a"] == [0]
    assert found["b"] == [*range(30)]


# What is said of it -----------------------------------------------------------------------------


def test_the_share_that_was_taken() -> None:
    cockpit, found = costly({"a": 0.01, "b": 0.5}, 0.1, 500)
    cockpit.close()
    spending = cockpit.history.spending
    assert spending is not None
    assert spending.share == 0.1
    assert spending.taken == pytest.approx(0.1, abs=0.02)
    assert spending.step_seconds == pytest.approx(1.01)
    assert spending.turns.keys() == {"b"}
    assert spending.turns["b"].count == len(found["b"])
    assert spending.turns["b"].seconds == pytest.approx(0.5)


def test_the_share_is_in_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    cockpit, _ = costly({"a": 0.01, "b": 0.5}, 0.1, 100, path=path)
    early = gradlens.History.load(path).spending
    assert early is not None
    assert early.turns["b"].count > 0
    cockpit.close()
    spending = gradlens.History.load(path).spending
    assert spending == cockpit.history.spending != early
    cockpit.history.write(tmp_path / "copy.jsonl")
    assert gradlens.History.load(tmp_path / "copy.jsonl").spending == spending


def test_a_histogram_adapts_its_range_when_it_is_tracked() -> None:
    """Adaptations at other steps would be paid by nobody."""
    model = nn.Linear(2, 1)
    histogram = GradHist1d(adapt=GradAbsMax())
    cockpit = gradlens.Cockpit(model, [histogram], budget=0.05)
    with cockpit(0):
        model(torch.ones(3, 2)).sum().backward()
    assert "no tracked step has needed them" in str(cockpit.coverage())


NO_TURNS: dict[str, tuple[dict[str, Any], str]] = {
    "a short run": ({"steps": 5}, r"to track a, b in 5 steps: the first 13 steps are measured"),
    "short steps": (
        {"steps": 100, "context": 0.3},
        r"to track a, b in 100 steps: contexts.*take 23.*Steps are too short for this budget",
    ),
    "few steps": (
        {"steps": 100, "kinds": {"b": HessTrace}},
        r"to track b in 100 steps: what a quantity costs is measured when it is tracked for the "
        r"first time.* on average, 10 plain steps\. Use a larger budget",
    ),
    "enough steps": ({"steps": 500}, r"^$"),
}


@pytest.mark.parametrize("case", NO_TURNS)
def test_what_had_no_turn_is_said(case: str) -> None:
    options, text = NO_TURNS[case]
    *_, budget = simulated(0.1, {"a": 20.0, "b": 1.0}, **options)
    assert re.search(text, budget.without_turns)


@pytest.mark.slow
def test_a_run() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
    tracked = [Loss(), GradNorm(), NormTest(), Alpha()]
    # Facts take more of a step of so small a network than the budget is.
    cockpit = gradlens.Cockpit(model, tracked, budget=0.3, facts=False)
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
