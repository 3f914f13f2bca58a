"""The questions and healthy loops that the diagnosis is judged by run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks.questions.__main__ import LOOPS, QUESTIONS, Gradlens, run, train
from benchmarks.questions.training import Watch
from gradlens.history.finding import TRUE

BY_NAME = {q.name: q for q in QUESTIONS + LOOPS}


def test_all_questions_have_an_address_and_an_answer() -> None:
    assert len(BY_NAME) == len(QUESTIONS) + len(LOOPS)
    assert all(q.cause and q.source.startswith("https://") for q in QUESTIONS)


def test_probabilities_are_those_of_the_runs_that_were_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    script = importlib.import_module("reliability")
    assert script.counts() == TRUE
    assert script.brier(script.counts("second"), "third") < 0.17
    script.main(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["nll_of_probabilities", "all_weights_zero"])
def test_mistake_hurts_and_gradlens_changes_nothing(name: str, tmp_path: Path) -> None:
    question = BY_NAME[name]
    faulty, fixed = (train(question, form, Watch(), 0) for form in (False, True))
    assert question.hurts(faulty, fixed)
    assert train(question, True, Gradlens(tmp_path, live=False), 0) == fixed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_healthy_loop_runs_with_live_diagnosis() -> None:
    row = run(BY_NAME["linear_model"], "healthy", 0, live=True)
    assert row.verdict in ("alarm", "quiet")
    assert row.result <= BY_NAME["linear_model"].limit
