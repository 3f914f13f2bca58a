"""Diagnosis of a run that grows."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import numpy as np
import pytest

from gradlens.diagnosis.diagnose import diagnose
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.live import LiveDiagnosis
from gradlens.diagnosis.rule import Rule, Sign
from gradlens.history.facts import Facts
from gradlens.history.history import History
from gradlens.messages import GradlensWarning
from tests.diagnosis.runs import SETUP, SHAPES, changed, run, step_columns


def test_a_finding_is_new_once() -> None:
    history = run(changed(step_columns(), input_rms=200.0))
    live = LiveDiagnosis(history)
    found = [live.after_step() for _ in range(60)]
    assert [each.fault for each in found[7]] == ["input_scale"]
    assert not any(found[8:])
    history.facts.setups[90] = replace(SETUP, missed=("4.weight",))
    assert [each.fault for each in live.now()] == ["optimizer_misses"]
    history.facts.setups[90] = replace(SETUP, missed=("4.weight", "2.weight"))
    assert [each.where for each in live.now()] == [("4.weight", "2.weight")]


def test_it_is_asked_less_and_less_often() -> None:
    asked: list[int] = []

    def find(evidence: Evidence) -> list[Sign]:
        asked.append(len(asked))
        return []

    live = LiveDiagnosis(run(), [Rule("mine", "Mine", find, "None.")])
    for _ in range(10_000):
        live.after_step()
    assert 50 < len(asked) < 90


def test_what_a_run_has_already_is_known() -> None:
    history = run(changed(step_columns(), input_rms=200.0))
    history.facts.findings += diagnose(history)
    assert not LiveDiagnosis(history).now()


def test_a_rule_that_fails_is_left_out() -> None:
    def find(evidence: Evidence) -> list[Sign]:
        raise ZeroDivisionError("no samples")

    live = LiveDiagnosis(run(), [Rule("mine", "Mine", find, "None.")])
    with pytest.warns(GradlensWarning, match=r"mine fails \(ZeroDivisionError: no samples\)"):
        assert not live.now()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not live.now()


def test_the_findings_of_growing_runs_are_those_of_the_whole_one() -> None:
    whole = changed(step_columns(), stale=1.0)
    history = History(parameters=SHAPES, facts=Facts({0: SETUP}))
    live, first = LiveDiagnosis(history), 0
    for step in range(len(whole["loss"])):
        history.facts.steps.add([step], {name: [float(c[step])] for name, c in whole.items()})
        if live.after_step():
            first = step
            break
    assert first == 7
    assert diagnose(run(whole))[0].fault == "zero_grad_missing"


@pytest.mark.slow
def test_all_rules_take_milliseconds() -> None:
    """On a full table of steps; the best of some, since machines are busy."""
    history = run(step_columns(8192), {})
    seconds = []
    for _ in range(20):
        started = time.thread_time()
        assert not diagnose(history)
        seconds.append(time.thread_time() - started)
    assert np.min(seconds) < 0.05
