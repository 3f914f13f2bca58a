"""Tracking within a share of the training time, by a clock of the tests' own."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradlens
from gradlens.cockpit.budget import SAID_AFTER, SETTLING, Budget
from gradlens.quantities import GradHist1d
from gradlens.quantities.bin_adaptation import GradAbsMax
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import SquaredNorms
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
    afterwards: float = 0.0,
    pause: float = 0.0,
    context: float = 0.0,
    in_hooks: float = 0.0,
    steps: int = STEPS,
) -> tuple[float, Counter[str], Budget]:
    """As ``simulate``, and the budget.

    ``ahead`` asks about a step before the one before has been paid for; ``afterwards`` is by how
    much the three steps after a tracked one are slower, ``pause`` comes after each 50th step,
    ``context`` is what entering and leaving takes at each, and ``in_hooks`` what hooks of the
    optimizer take after a tracked one.
    """
    clock, draws = Clock(), random.Random(0)
    budget = Budget(share, list(costs), clock=clock)
    count: Counter[str] = Counter()
    spent, slow = 0.0, 0
    for step in range(steps):
        budget.begin_step(step)
        active = [*costs] if budget.has_means(step) and step % interval == 0 else []
        count.update(active)
        cost = sum(costs[each] for each in active) + (afterwards if slow else 0)
        slow = 3 if active else max(slow - 1, 0)
        hooked = in_hooks if active else 0
        spent += cost + context + hooked
        clock.now += context / 2
        budget.begin_backward()
        clock.now += max(1 + cost + draws.gauss(0, noise), 0.1) - 0.5
        budget.end_backward(active)
        clock.now += context / 2
        budget.end_step()
        began = clock.now
        clock.now += hooked
        budget.optimizer_step(began)
        clock.now += 0.5 + (pause if step % 50 == 0 else 0)
        if ahead:
            budget.has_means(step + 1)
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
    # After each look some steps are left untracked, to see what it has cost.
    most = sum(costs.values()) / (SETTLING + 1 + sum(costs.values()))
    assert found >= 0.5 * min(share, most)


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_that_tracking_slows_down_are_paid_for(ahead: bool) -> None:
    found, count = simulate(0.05, {"a": 0.3, "b": 0.1}, afterwards=0.2, ahead=ahead)
    assert 0.03 <= found <= 0.06
    assert count["a"] == count["b"]


@pytest.mark.parametrize("context", [0.02, 0.08])
def test_contexts_of_untracked_steps_are_paid_for(context: float) -> None:
    """Without means, there is the first look alone, which nothing can be known without."""
    found, count = simulate(0.05, {"a": 0.3, "b": 0.1}, context=context)
    assert found <= max(0.06, context)
    assert (count["a"] > 1) == (context < 0.05)


def test_hooks_of_the_optimizer_are_paid_for() -> None:
    """Also where they take longer than several steps, as nothing else between two contexts does."""
    found, count, budget = simulated(0.1, {"a": 0.0}, in_hooks=9.0, steps=400)
    assert 2 <= count["a"] <= 6
    assert budget.spending.taken == pytest.approx(found, rel=0.01)


def test_a_validation_is_nobodys_cost() -> None:
    costs = {"a": 0.3, "b": 0.1}
    _, count = simulate(0.05, costs)
    _, interrupted = simulate(0.05, costs, pause=100.0)
    # Its time is part of the training time.
    assert interrupted["a"] >= count["a"] > 0


def test_steps_that_never_come() -> None:
    """Somebody asks about them, and who is chosen there need not pay."""
    clock = Clock()
    budget = Budget(0.2, "ab", clock=clock)
    count = 0
    for step in range(0, 2 * STEPS, 2):
        budget.begin_step(step)
        active = "ab" if budget.has_means(step) else ""
        count += len(active)
        budget.begin_backward()
        clock.now += 1 + 0.1 * len(active)
        budget.end_backward(active)
        budget.end_step()
        budget.has_means(step + 1)
    assert count > 100


def test_the_schedule_stays_in_force() -> None:
    _, count = simulate(0.5, {"a": 0.01}, interval=10)
    assert 35 <= count["a"] <= 50


# Runs -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Costly(SingleStepQuantity):
    """Takes so many seconds of a clock that stands still otherwise."""

    clock: Clock = field(default_factory=Clock)
    seconds: float = 0.0

    def compute(self, step: Step) -> float:
        self.clock.now += self.seconds
        return 0.0


class CostlyLook(Costly):
    """The same beside per-sample gradients."""

    reductions = (SquaredNorms(),)


def costly(
    light: float, look: float, share: float, steps: int, interval: int = 1, path: Path | None = None
) -> tuple[gradlens.Cockpit, dict[str, list[int]]]:
    """A run whose steps take a second, and the steps at which each quantity was tracked."""
    clock, model = Clock(), nn.Linear(2, 1)
    schedule = linear(interval)
    tracked = [
        Costly(schedule, name="light", clock=clock, seconds=light),
        CostlyLook(schedule, name="look", clock=clock, seconds=look),
    ]
    cockpit = gradlens.Cockpit(model, tracked, budget=share, run=path)
    assert cockpit.budget is not None
    cockpit.budget.clock = clock
    for step in range(steps):
        with cockpit(step):
            model(torch.ones(3, 2)).sum().backward()
            clock.now += 1
    names = [quantity.name for quantity in tracked]
    return cockpit, {name: [*cockpit.history[name]] for name in names}


def test_all_that_is_scheduled_is_tracked_together() -> None:
    cockpit, found = costly(0.01, 3.0, 0.1, 400)
    cockpit.close()
    assert 5 <= len(found["look"]) <= 20
    assert found["light"] == found["look"]
    assert [*cockpit.history.facts["steps"]] == found["look"]


def test_facts_alone_are_thinned() -> None:
    clock, model = Clock(), nn.Linear(2, 1)
    cockpit = gradlens.Cockpit(model, [], budget=0.1)
    assert cockpit.budget is not None
    cockpit.budget.clock = clock
    for step in range(200):
        with cockpit(step):
            model(torch.ones(3, 2)).sum().backward()
            clock.now += 1
    cockpit.close()
    assert 10 <= len(cockpit.history.facts["steps"]) <= 200 / (SETTLING + 1)


def test_the_share_that_was_taken() -> None:
    cockpit, found = costly(0.01, 0.5, 0.1, 500)
    cockpit.close()
    spending = cockpit.history.spending
    assert spending is not None
    assert spending.share == 0.1
    assert spending.taken <= 0.11
    assert spending.step_seconds == pytest.approx(1)
    assert spending.turns == {name: len(steps) for name, steps in found.items()}
    assert spending.look_seconds == pytest.approx(0.51)


def test_the_share_is_in_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    cockpit, _ = costly(0.01, 0.5, 0.1, 100, path=path)
    early = gradlens.History.load(path).spending
    assert early is not None
    assert early.turns["look"] > 0
    cockpit.close()
    spending = gradlens.History.load(path).spending
    assert spending == cockpit.history.spending
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


def test_a_short_run_is_said_to_be_short() -> None:
    *_, budget = simulated(0.1, {"a": 20.0, "b": 1.0}, steps=5)
    assert re.search("a, b had no turn in 5 steps: the first 10 steps are", budget.without_turns)


@pytest.mark.parametrize(("share", "context", "cost", "said"), [
    (0.03, 0.1, 5.0, True), (0.03, 0.001, 5.0, False), (0.003, 0.001, 5.0, True),
])  # fmt: skip
def test_a_share_that_pays_for_nothing_is_said_early(
    share: float, context: float, cost: float, said: bool
) -> None:
    """And the share that is named pays for some."""
    *_, budget = simulated(share, {"a": cost}, context=context, steps=SAID_AFTER)
    assert bool(budget.pays_for_none) == said
    if said:
        needed = float(re.findall(r"use budget=([0-9.]+)", budget.pays_for_none)[0])
        _, count = simulate(needed, {"a": cost}, context=context, steps=3000)
        assert count["a"] > 1
