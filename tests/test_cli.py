"""The command line, as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradlens import History, __version__
from gradlens.cli import main


def test_demo_trains_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "demo"
    assert main(["demo", "--out", str(out), "--steps", "40", "--seed", "1"]) == 0
    printed = capsys.readouterr()
    assert str(out / "run.jsonl") in printed.out
    assert str(out / "cockpit.png") in printed.out
    assert "40/40" in printed.err
    history = History.load(out / "run.jsonl")
    assert history.steps == tuple(range(40))
    ends = {"Alpha": 39, "TICDiag": 4, "HessTrace": 4, "HessMaxEV": 4}
    assert all(len(history[name]) == ends.get(name, 40) for name in history.names)
    assert not history.notes
    losses = history["Loss"]
    assert losses[39] < losses[0]
    assert (out / "cockpit.png").read_bytes().startswith(b"\x89PNG")


def test_demo_is_reproducible(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert main(["demo", "--out", str(tmp_path / name), "--steps", "3"]) == 0
    a, b = (History.load(tmp_path / name / "run.jsonl") for name in ("a", "b"))
    for name in ("Loss", "NormTest", "GradNorm"):
        assert a[name] == b[name]


def test_existing_run_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text("precious")
    assert main(["demo", "--out", str(tmp_path), "--steps", "1"]) == 1
    assert "run.jsonl exists and is kept" in capsys.readouterr().err
    assert (tmp_path / "run.jsonl").read_text() == "precious"


def test_directory_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file"), "--steps", "1"]) == 1
    assert "file" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["demo", "--steps", "0"], ["demo", "--what"]])
def test_wrong_calls(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: gradlens" in capsys.readouterr().err


def test_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "gradlens", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"gradlens {__version__}\n"
