"""Diagnosis of a run that grows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradlens import Cockpit
from gradlens.diagnosis.diagnose import diagnose
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.rule import Rule, Sign
from gradlens.diagnosis.rules import RULES
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.json_lines import encoded
from gradlens.messages import GradlensWarning
from gradlens.observers.live_diagnosis import LiveDiagnosis
from gradlens.observers.observer import Outcome, StepContext
from tests.cases.steps import tracked_backward
from tests.diagnosis.runs import SETUP, SHAPES, changed, layer_columns, row, run, step_columns


class Watched:
    """A run as a live diagnosis writes to it, and what is new after a step or at the end."""

    def __init__(self, history: History, rules: Sequence[Rule] = RULES) -> None:
        self.history = history
        self.live = LiveDiagnosis(self, rules)
        self.new: list[Finding] = []

    def note(self, global_step: int, text: str) -> None:
        pytest.fail(text)

    def say(self, text: str) -> None:
        pytest.fail(text)

    def take_in(self, global_step: int, kind: str, content: Any) -> None:
        self.new.append(content)

    def after_step(self) -> list[Finding]:
        self.new = []
        self.live.leave(StepContext(0, {}), Outcome())
        return self.new

    def now(self) -> list[Finding]:
        self.new = []
        self.live.close()
        return self.new


def test_a_finding_is_new_once() -> None:
    layers = layer_columns(still=["2.weight", "4.weight"])
    setup = replace(SETUP, groups=())
    history = run(changed(step_columns(), input_rms=200.0), layers, setup)
    live = Watched(history)
    found = [live.after_step() for _ in range(60)]
    assert [each.fault for each in found[7]] == ["input_scale"]
    assert not any(found[8:])
    history.setups[90] = replace(setup, missed=("4.weight",))
    assert [each.fault for each in live.now()] == ["optimizer_misses"]
    history.setups[90] = replace(setup, missed=("4.weight", "2.weight"))
    assert [each.where for each in live.now()] == [("4.weight", "2.weight")]


def test_it_is_asked_less_and_less_often() -> None:
    asked: list[int] = []

    def find(evidence: Evidence) -> list[Sign]:
        asked.append(len(asked))
        return []

    live = Watched(run(), [Rule("mine", "Mine", find, "None.")])
    for _ in range(10_000):
        live.after_step()
    assert 50 < len(asked) < 90


def test_what_a_run_has_already_is_known() -> None:
    history = run(changed(step_columns(), input_rms=200.0))
    history.findings += diagnose(history)
    assert not Watched(history).now()


def test_a_rule_that_fails_is_left_out() -> None:
    def find(evidence: Evidence) -> list[Sign]:
        raise ZeroDivisionError("no samples")

    live = Watched(run(), [Rule("mine", "Mine", find, "None.")])
    with pytest.warns(GradlensWarning, match=r"mine fails \(ZeroDivisionError: no samples\)"):
        assert not live.now()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not live.now()


def test_the_findings_of_growing_runs_are_those_of_the_whole_one() -> None:
    whole = changed(step_columns(), stale=1.0)
    history = History(parameters=SHAPES, setups={0: SETUP})
    live, first = Watched(history), 0
    for step in range(len(whole["loss"])):
        history.add_facts(step, {"steps": encoded(row(whole, step))})
        if live.after_step():
            first = step
            break
    assert first == 7
    assert diagnose(run(whole))[0].fault == "zero_grad_missing"


RUN = 240
"""Steps of a run, a tenth of which is trained."""


def train(fault: str) -> list[tuple[str, bool]]:
    """What is found in the first tenth of a run, and whether it is an alarm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    model.append(nn.Linear(32, 5))
    if fault == "dead_units":
        nn.init.constant_(model.get_parameter("2.bias"), -4)
    trained = model[2:] if fault == "optimizer_misses" else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=50.0 if fault == "lr_too_high" else 0.05)
    cockpit = Cockpit(model, [], diagnose=True)
    for step in range(RUN // 10):
        inputs = torch.randn(32, 20)
        targets = inputs[:, :5].argmax(1)
        if fault == "input_scale":
            inputs = 255 * inputs
        loss = functional.cross_entropy(model(inputs), targets)
        if fault != "zero_grad_missing":
            optimizer.zero_grad()
        tracked_backward(cockpit, step, loss, optimizer=optimizer)
        optimizer.step()
    return [(each.fault, each.is_alarm) for each in cockpit.history.findings]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["optimizer_misses", "zero_grad_missing", "input_scale", "dead_units", "lr_too_high"]
)
def test_a_fault_is_found_before_a_tenth_of_the_run(fault: str) -> None:
    """It is an alarm, and the user is warned of it."""
    title = next(rule.title for rule in RULES if rule.fault == fault)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = train(fault)
    assert (fault, True) in found
    assert any(title in str(each.message) for each in said)


@pytest.mark.slow
def test_nothing_is_found_in_the_first_tenth_of_a_healthy_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not train("")


def test_a_cockpit_takes_rules_of_others() -> None:
    mine = Rule("mine", "Mine", lambda evidence: [Sign(0, ())], "None.")
    model = nn.Linear(3, 2)
    cockpit = Cockpit(model, [], diagnose=[mine])
    tracked_backward(cockpit, 0, model(torch.randn(4, 3)).square().mean())
    with pytest.warns(GradlensWarning, match="Mine"):
        cockpit.close()
    assert [each.fault for each in cockpit.history.findings] == ["mine"]
