"""What a run says after fifty steps."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradlens import Cockpit, History, quantities
from gradlens.cli.summary_text import render
from gradlens.cockpit.budget import SAID_AFTER as AFTER
from gradlens.cockpit.budget import StepTimes, spending
from gradlens.diagnosis.opening import SHOWN_BY, SINGLE, opening
from gradlens.diagnosis.rules import RULES
from gradlens.history.records import Spending
from gradlens.plotting.summary import summarize
from gradlens.quantities import Quantity
from tests.sinks.cases import Kept

LINES = ("cost", "covered", "found", "next")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.INFO, "gradlens"):
        yield lambda: [each.split(": ", 1)[1] for each in caplog.messages]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def train(
    model: nn.Module,
    cockpit: Cockpit | None,
    steps: int = AFTER + 5,
    parts: int = 1,
    **given: Any,
) -> None:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            inputs = torch.randn(5, 4)
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :2].argmax(1))
            if cockpit is None:
                loss.backward()
                continue
            chosen = {"loss": loss, "optimizer": optimizer, **given}
            known = {name: each for name, each in chosen.items() if each is not None}
            with cockpit(step, accumulating=part + 1 < parts, **known):
                loss.backward()
        optimizer.step()


def some(every: int = 1) -> list[Quantity]:
    return [quantities.GradNorm(every)]


@pytest.mark.filterwarnings("ignore:.*budget")
@pytest.mark.parametrize("options", [{}, {"budget": 0.9}], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_run_says_four_lines_once(
    options: dict[str, Any], parts: int, said: Callable[[], list[str]]
) -> None:
    model = net()
    plain = copy.deepcopy(model)
    sink = Kept()
    cockpit = Cockpit(model, some(), sinks=[sink], **options)
    train(model, cockpit, parts=parts)
    cockpit.close()
    assert [line.split(": ")[0] for line in said()] == [*LINES]
    assert [text.split(": ")[0] for _, text in sink.notes if text in said()] == [*LINES]
    train(plain, None, parts=parts)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{"steps": AFTER - 1}, {"facts": False}], ids=str)
def test_short_runs_and_those_without_facts_say_nothing(
    options: dict[str, Any], said: Callable[[], list[str]]
) -> None:
    steps = {"steps": options.pop("steps")} if "steps" in options else {}
    train(model := net(), Cockpit(model, some(), **options), **steps)
    assert not said()


def test_it_can_be_silenced(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("gradlens")
    logger.setLevel(logging.WARNING)
    try:
        train(model := net(), Cockpit(model, some(4)))
    finally:
        logger.setLevel(logging.INFO)
    assert capfd.readouterr() == ("", "")


def test_the_summary_and_the_notebook_say_the_same(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    train(
        model := net(),
        cockpit := Cockpit(model, some(), run=tmp_path / "run.jsonl"),
        AFTER + 1,
    )
    cockpit.close()
    history = History.load(tmp_path / "run.jsonl")
    cost, covered, *_ = opening(history)
    assert [cost, covered] == said()[:2]
    lines = render(summarize(history), 1000).splitlines()
    assert [*opening(history)] == lines[2:6]
    for line in opening(cockpit.history):
        assert line.split(": ")[0] in cockpit._repr_html_()


def test_a_smaller_last_batch_is_not_taken_for_all() -> None:
    cockpit = Cockpit(model := net(), [quantities.NormTest()])
    for step, samples in enumerate((8, 8, 3)):
        with cockpit(step):
            nn.functional.cross_entropy(
                model(torch.randn(samples, 4)), torch.zeros(samples).long()
            ).backward()
    cockpit.close()
    assert "N = 3 to 8" in opening(cockpit.history)[1]


def test_what_is_missing_is_recommended_until_it_is_there() -> None:
    def advice(chosen: list[Quantity], valid: bool = False, **given: Any) -> str:
        train(model := net(), cockpit := Cockpit(model, chosen), 12, **given)
        if valid:
            cockpit.log(11, valid_loss=1.0)
        cockpit.close()
        return opening(cockpit.history)[-1]

    assert "optimizer=optimizer" in advice(some(), optimizer=None)
    assert "economy" in advice([])
    assert "valid_loss" in advice(some())
    assert "nothing is missing" in advice(some(), valid=True)


def test_what_shows_more_of_a_fault_is_tracked_next() -> None:
    cockpit = Cockpit(model := net(), some())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
    for step in range(20):
        inputs = torch.randn(16, 4)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :2])
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    cockpit.close()
    *_, found, advice = opening(cockpit.history)
    assert "learning rate" in found
    assert "HessMaxEV" in advice


def test_a_fault_has_quantities_that_show_more_of_it() -> None:
    faults = {rule.fault for rule in RULES}
    assert {*SHOWN_BY, *SINGLE} <= faults
    for words in SHOWN_BY.values():
        made = eval(f"[{words}]", vars(quantities))
        assert all(isinstance(each, Quantity) for each in made)


def test_a_run_without_facts_has_no_opening() -> None:
    assert opening(History()) == ()


def test_a_summary_that_fails_costs_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: History) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("gradlens.cockpit.tracking.opening", failing)
    model = net()
    cockpit = Cockpit(model, [quantities.GradNorm()])
    with pytest.warns(UserWarning, match="summing up the first steps failed"):
        train(model, cockpit)
    assert [*cockpit.history["GradNorm"]] == [*range(AFTER + 5)]


# What tracking costs ------------------------------------------------------------------------------


def test_looks_are_compared_with_plain_steps() -> None:
    plain = [StepTimes(1.1, 0.1, 0.5, False)] * 8
    found = spending([*plain, *[StepTimes(3.0, 0.5, 2.0, True)] * 2])
    assert found.step_seconds == pytest.approx(1.0)
    assert found.look_seconds == pytest.approx(2.0)
    assert found.taken == pytest.approx((8 * 0.1 + 2 * 2.0) / (8 * 1.1 + 2 * 3.0))
    assert found.at_most is None


def test_without_plain_steps_there_are_bounds() -> None:
    found = spending([StepTimes(3.0, 0.5, 2.0, True)] * 5)
    assert (found.taken, found.at_most) == (pytest.approx(0.5 / 3), pytest.approx(2.5 / 3))
    assert math.isnan(found.step_seconds)


def test_turns_that_were_faster_than_other_steps_have_no_negative_share() -> None:
    assert "-" not in next(Spending(0.05, -0.03).lines())


@pytest.mark.parametrize(("taken", "is_said"), [(0.0747, True), (0.041, False)])
def test_a_share_above_the_budget_has_its_reason(taken: float, is_said: bool) -> None:
    assert ("first turn" in next(Spending(0.05, taken).lines())) == is_said


@pytest.mark.parametrize("every", [1, 5])
def test_the_cost_of_a_run(every: int) -> None:
    train(model := net(), cockpit := Cockpit(model, [quantities.GradNorm(every)]))
    found = cockpit.history.spending
    assert found is not None
    assert 0 < found.taken <= 1
    assert (found.at_most is None) == math.isfinite(found.step_seconds) == (every > 1)
