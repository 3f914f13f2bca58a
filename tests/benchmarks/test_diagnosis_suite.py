"""The suite's problems learn, its loop is deterministic, and its scores can't be earned cheaply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from scipy.stats import binomtest

from benchmarks.diagnosis import controls
from benchmarks.diagnosis.controls import CONTROLS, has_learnt
from benchmarks.diagnosis.development.problems import BASICS
from benchmarks.diagnosis.faults.fault import Injected
from benchmarks.diagnosis.loop import train
from benchmarks.diagnosis.measure import Row
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.report import report, write
from benchmarks.diagnosis.scoring import Score, score, wilson
from benchmarks.diagnosis.training import Training
from gradlens import load_run

PROBLEMS = tuple(training.problem for training in BASICS)
BY_NAME = {problem.name: problem for problem in PROBLEMS}
NAMES = [*BY_NAME]


@dataclass(frozen=True)
class Found:
    """What is scored of a finding."""

    fault: str
    step: int = 0
    is_alarm: bool = True
    where: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()


TRUTH = Injected(
    Training(PROBLEMS[0]), frozenset({"0", "2.weight"}), step=5, samples=frozenset({3, 17})
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[::3])
def test_problem_is_learnt_in_its_steps_without_overfitting(name: str) -> None:
    outcome = train(Training(BY_NAME[name]), 0)
    assert outcome.end < 0.7 * outcome.start
    assert outcome.valid_end < 0.7 * outcome.valid_start
    assert outcome.peak < 2.5 * outcome.start
    # Of a loss that is nearly zero, a rise is noise.
    assert outcome.valid_end < 1.1 * outcome.valid_least + 0.02 * outcome.valid_start


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[::4])
def test_a_run_is_the_same_again_and_under_a_cockpit(name: str, tmp_path: Path) -> None:
    problem = replace(BY_NAME[name], steps=12)
    first = train(Training(problem), 1)
    assert train(Training(problem), 1) == first
    assert train(Training(problem), 1, tmp_path / "run.jsonl") == first
    assert train(Training(problem), 2).losses != first.losses
    history = load_run(tmp_path / "run.jsonl")
    assert [*history["valid_loss"]] == [0, 10, 11]


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS[::3], ids=lambda control: control.way)
def test_control_runs_under_a_cockpit(control: controls.Control, tmp_path: Path) -> None:
    possible: list[tuple[Problem, Training]] = [
        (problem, training)
        for problem in PROBLEMS
        if (training := control.apply(Training(problem), 0)) is not None
    ]
    assert possible
    problem = replace(possible[0][1].problem, steps=6)
    training = replace(possible[0][1], problem=problem)
    assert train(training, 0, tmp_path / "run.jsonl") == train(training, 0)


def test_an_expected_number_of_controls_is_spread_over_ways_and_problems() -> None:
    pairs = controls.pairs(PROBLEMS, 100)
    assert len(pairs) == len({*pairs}) == 100
    assert {problem for _, problem in pairs} == {*NAMES}
    assert {way for way, _ in pairs} == {control.way for control in CONTROLS}


def test_what_has_not_learnt_is_no_control() -> None:
    problem = replace(BY_NAME["tanh"], rate=1e-6)
    assert not has_learnt(train(Training(problem), 0))


# Scores.


def test_notices_do_not_count() -> None:
    found = score([Found("input_scale", is_alarm=False)], "input_scale", TRUTH, True)
    assert found == Score(False, False, False, False)


@pytest.mark.parametrize(
    ("notice", "is_harmful", "counts"),
    [("always", True, True), ("harmless", False, True), ("harmless", True, False)],
)
def test_notices_count_where_the_fault_is_to_be_noticed(
    notice: str, is_harmful: bool, counts: bool
) -> None:
    truth = replace(TRUTH, notice=notice)
    found = score([Found("loss_sum", is_alarm=False)], "loss_sum", truth, is_harmful)
    assert (found.is_named, found.is_alarmed) == (counts, False)


def test_what_looks_alike_is_not_named() -> None:
    found = score([Found("lr_edge")], "lr_too_high", TRUTH, True)
    assert (found.is_named, found.is_alike, found.is_alarmed) == (False, True, True)
    assert found.is_layer_right is None


def test_the_first_alarm_is_first() -> None:
    findings = [Found("data_order", is_alarm=False), Found("dead_units"), Found("lr_too_high")]
    assert score(findings, "dead_units", TRUTH, True).is_first
    later = score(findings, "lr_too_high", TRUTH, True)
    assert (later.is_named, later.is_first) == (True, False)


@pytest.mark.parametrize(
    ("where", "is_right"),
    [
        (("0",), True),
        (("0.weight", "2.weight"), True),
        (("2",), True),
        (("0", "4"), False),
        ((), False),
        (("00",), False),
    ],
)
def test_all_layers_that_are_named_must_have_the_fault(
    where: tuple[str, ...], is_right: bool
) -> None:
    found = score([Found("dead_units", where=where)], "dead_units", TRUTH, True)
    assert found.is_layer_right is is_right


@pytest.mark.parametrize(("step", "is_right"), [(4, True), (6, True), (7, False)])
def test_steps_are_right_within_one(step: int, is_right: bool) -> None:
    found = score([Found("dead_units", step)], "dead_units", TRUTH, True)
    assert found.is_step_right is is_right


@pytest.mark.parametrize(
    ("samples", "is_right"), [(("3",), True), (("17", "4"), True), (("4",), False), ((), False)]
)
def test_half_of_the_samples_must_be_right(samples: tuple[str, ...], is_right: bool) -> None:
    found = score([Found("dead_units", samples=samples)], "dead_units", TRUTH, True)
    assert found.is_sample_right is is_right


@pytest.mark.parametrize(("hits", "count"), [(0, 5), (5, 5), (97, 102), (1, 1)])
def test_interval_is_scipys(hits: int, count: int) -> None:
    expected = binomtest(hits, count).proportion_ci(method="wilson")
    assert wilson(hits, count) == pytest.approx((expected.low, expected.high), abs=1e-4)


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
