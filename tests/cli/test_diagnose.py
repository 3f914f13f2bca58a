"""``gradlens diagnose``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradlens.cli.main import main
from gradlens.diagnosis.rules import RULES
from gradlens.history.history import History
from gradlens.history.records import Source
from tests.diagnosis.test_rules import FAULTY, HEALTHY, NOTICED


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def written(history: History, path: Path) -> str:
    history.write(path)
    return str(path)


def test_a_fault_and_what_follows_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(FAULTY["input_constant"][0], tmp_path / "run.jsonl")
    assert main(["diagnose", run]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[2].startswith("Inputs hardly differ between samples (input_constant: very likely)")
    assert "  first seen at step 0" in lines
    assert "What to do: Look at what the loader returns" in text
    assert "\n    Nothing is learnt" in text  # it is indented
    assert "follows from" in text


@pytest.mark.parametrize("width", [20, 30, 50, 120])
def test_lines_fit_in_the_terminal(
    width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    run = written(FAULTY["dead_units"][2], tmp_path / "run.jsonl")
    assert main(["diagnose", run, "--all"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(HEALTHY["plain"], tmp_path / "run.jsonl")
    assert main(["diagnose", run]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "nothing wrong was found in 160 steps" in text
    assert "Looked for: nonfinite_input," in text
    assert "Could not be looked for: padding_in_loss, saturated_units," in text
    assert main(["diagnose", run, "--all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "overfitting needs a validation loss: cockpit.log(step, valid_loss=...)" in text


def test_notices_stand_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(NOTICED["frozen_layer"][0], tmp_path / "run.jsonl")
    assert main(["diagnose", run]) == 0
    heading, _, rest = capsys.readouterr().out.partition("Notices, of what may be intended")
    assert "nothing wrong was found" in heading
    assert "where: 0.weight" in rest


def test_json_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    infinite = FAULTY["lr_too_high"][2]
    runs = [
        written(infinite, tmp_path / "infinite.jsonl"),
        written(HEALTHY["plain"], tmp_path / "plain.jsonl"),
    ]
    assert main(["diagnose", "--json", *runs]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [first["run"], second["run"]] == runs
    assert first["findings"][0]["fault"] == "lr_too_high"
    assert second["findings"] == []
    assert "overfitting" in second["unasked"]
    assert len(second["asked"]) + len(second["unasked"]) == len(RULES)


def test_a_run_without_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = History({"Loss": Source(("Loss",))})
    history.append(0, {"Loss": 1.0})
    assert main(["diagnose", written(history, tmp_path / "run.jsonl")]) == 0
    assert "nothing wrong was found in 1 step" in capsys.readouterr().out


def test_steps_that_were_not_recorded_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History({"Loss": Source(("Loss",))})
    for step in (10, 95, 344):
        history.append(step, {"Loss": 1.0})
    assert main(["diagnose", written(history, tmp_path / "run.jsonl")]) == 0
    assert "nothing wrong was found in 3 steps" in capsys.readouterr().out
