"""The suite's problems learn, its loop is deterministic, and its scores can't be earned cheaply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.diagnosis import controls
from benchmarks.diagnosis.controls import CONTROLS, has_learnt
from benchmarks.diagnosis.development import BASICS
from benchmarks.diagnosis.faults.fault import Injected
from benchmarks.diagnosis.loop import train
from benchmarks.diagnosis.measure import Row
from benchmarks.diagnosis.report import report, write
from benchmarks.diagnosis.scoring import score
from benchmarks.diagnosis.training import Training
from gradlens import load_run

BY_NAME = {problem.name: problem for problem in BASICS}
NAMES = [*BY_NAME]


@dataclass(frozen=True)
class Found:
    """What is scored of a finding."""

    fault: str
    step: int = 0
    is_alarm: bool = True
    where: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()


TRUTH = Injected(BASICS[0], frozenset({"0", "2.weight"}), step=5, samples=frozenset({3, 17}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[::3])
def test_problem_is_learnt_in_its_steps_without_overfitting(name: str) -> None:
    outcome = train(BY_NAME[name], 0)
    assert outcome.end < 0.7 * outcome.start
    assert outcome.valid_end < 0.7 * outcome.valid_start
    assert outcome.peak < 2.5 * outcome.start
    # Of a loss that is nearly zero, a rise is noise.
    assert outcome.valid_end < 1.1 * outcome.valid_least + 0.02 * outcome.valid_start


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[::4])
def test_a_run_is_the_same_again_and_under_a_cockpit(name: str, tmp_path: Path) -> None:
    problem = replace(BY_NAME[name], steps=12)
    first = train(problem, 1)
    assert train(problem, 1) == first
    assert train(problem, 1, tmp_path / "run.jsonl") == first
    assert train(problem, 2).losses != first.losses
    history = load_run(tmp_path / "run.jsonl")
    assert [*history["valid_loss"]] == [0, 10, 11]


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS[::3], ids=lambda control: control.way)
def test_control_runs_under_a_cockpit(control: controls.Control, tmp_path: Path) -> None:
    possible: list[Training] = [
        training for problem in BASICS if (training := control.apply(problem, 0)) is not None
    ]
    assert possible
    training = replace(possible[0], steps=6)
    assert train(training, 0, tmp_path / "run.jsonl") == train(training, 0)


def test_an_expected_number_of_controls_is_spread_over_ways_and_problems() -> None:
    pairs = controls.pairs(BASICS, 100)
    assert len(pairs) == len({*pairs}) == 100
    assert {problem for _, problem in pairs} == {*NAMES}
    assert {way for way, _ in pairs} == {control.way for control in CONTROLS}


def test_what_has_not_learnt_is_no_control() -> None:
    problem = replace(BY_NAME["tanh"], rate=1e-6)
    assert not has_learnt(train(problem, 0))


# Scores.


NOTICE = Found("loss_sum", is_alarm=False)
SCORES: dict[str, tuple[list[Found], str, dict[str, Any], dict[str, object]]] = {
    "a notice": ([NOTICE], "loss_sum", {}, {"is_named": False, "is_alarmed": False}),
    "a notice of what is always noticed": (
        *([NOTICE], "loss_sum", {"notice": "always"}, {"is_named": True, "is_alarmed": False}),
    ),
    "what looks alike": (
        *([Found("lr_edge")], "lr_too_high", {}),
        {"is_named": False, "is_alike": True, "is_alarmed": True, "is_layer_right": None},
    ),
    "the first alarm": ([NOTICE, Found("a"), Found("b")], "a", {}, {"is_first": True}),
    "a later alarm": ([Found("a"), Found("b")], "b", {}, {"is_named": True, "is_first": False}),
    **{
        f"layers {where}": ([Found("a", where=where)], "a", {}, {"is_layer_right": is_right})
        for where, is_right in (
            *((("0",), True), (("0.weight", "2.weight"), True), (("2",), True)),
            *((("0", "4"), False), ((), False), (("00",), False)),
        )
    },
    **{
        f"step {step}": ([Found("a", step)], "a", {}, {"is_step_right": is_right})
        for step, is_right in ((4, True), (6, True), (7, False))
    },
    **{
        f"samples {samples}": ([Found("a", samples=samples)], "a", {}, {"is_sample_right": right})
        for samples, right in ((("3",), True), (("17", "4"), True), (("4",), False), ((), False))
    },
}
"""Findings, the fault, what is special about it, and what is scored."""


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    findings, fault, changes, expected = SCORES[name]
    found = score(findings, fault, replace(TRUTH, **changes), True)
    assert {field: getattr(found, field) for field in expected} == expected


@pytest.mark.parametrize(("is_harmful", "counts"), [(False, True), (True, False)])
def test_notices_of_what_may_be_harmless(is_harmful: bool, counts: bool) -> None:
    truth = replace(TRUTH, notice="harmless")
    assert score([NOTICE], "loss_sum", truth, is_harmful).is_named == counts


def test_a_report_names_false_alarms_and_what_is_left_out(tmp_path: Path) -> None:
    named = score([Found("input_scale")], "input_scale", TRUTH, True)
    rows = [
        Row("input_scale", "factor", 0, 10.0, "MLP", 0, 150, score=named, alarms=("input_scale",)),
        Row("lr_edge", "times", 1, 0.5, "MLP", 0, 150, left_out="absent"),
        Row("", "cosine", -1, 0.0, "CNN", 0, 150, alarms=("label_noise",)),
        Row("", "as it is", -1, 0.0, "CNN", 0, 150),
    ]
    text = "\n".join(report(rows))
    assert "false alarms in healthy runs: 1 of 2" in text
    assert "label_noise: CNN, cosine, seed 0" in text
    assert "1 lr_edge (middle): absent" in text
    write(rows, tmp_path / "rows.csv")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 5
