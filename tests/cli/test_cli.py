"""The command line, as a user calls it."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradlens import History, __version__
from gradlens.cli import commands
from gradlens.cli.main import main
from gradlens.history.records import Samples
from gradlens.history.spikes import Spike, Suspect
from gradlens.sinks import CSV
from tests.instruments.test_instruments import realistic


@pytest.mark.slow
def test_demo_trains_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "demo"
    assert main(["demo", "--out", str(out), "--steps", "20", "--seed", "1"]) == 0
    printed = capsys.readouterr()
    assert str(out / "run.jsonl") in printed.out
    assert str(out / "cockpit.png") in printed.out
    assert "20/20" in printed.err
    history = History.load(out / "run.jsonl")
    assert history.steps == tuple(range(20))
    ends = {"Alpha": 19, "TICTrace": 2, "HessTrace": 2, "HessMaxEV": 2}
    assert all(len(history[name]) == ends.get(name, 20) for name in history.names)
    assert not history.notes
    losses = history["Loss"]
    assert losses[19] < losses[0]
    assert (out / "cockpit.png").read_bytes().startswith(b"\x89PNG")
    assert main(["demo", "--out", str(out / "again"), "--steps", "3", "--seed", "1"]) == 0
    again = History.load(out / "again" / "run.jsonl")
    for name in ("Loss", "NormTest", "GradNorm"):
        assert dict(again[name]) == {step: history[name][step] for step in range(3)}


def test_existing_run_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text("precious")
    assert main(["demo", "--out", str(tmp_path), "--steps", "1"]) == 1
    assert "run.jsonl exists and is kept" in capsys.readouterr().err
    assert (tmp_path / "run.jsonl").read_text() == "precious"


WRONG = (
    "",
    "fly",
    "demo --steps 0",
    "plot a --frames 0",
    "watch a --interval 0",
    "watch a --interval inf",
    "summary a --json --csv",
    "watch a --text -o b.png",
    "compare a",
    "autopsy a soon",
    "samples a --top 0",
    "export a --to sheet b",
    "export a --to csv",
    "export a --to csv b c",
    "export a --to wandb b c",
    "export a --to csv b --every 0",
)


@pytest.mark.parametrize("arguments", [call.split() for call in WRONG], ids=" ".join)
def test_wrong_calls(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: gradlens" in capsys.readouterr().err


# Figures ------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's file."""
    path = tmp_path / "lr0.1" / "run.jsonl"
    path.parent.mkdir()
    realistic(20, ("Loss", "GradNorm", "SpectralDensity")).write(path)
    return path


def called(*arguments: object) -> int:
    """The exit code of a call."""
    return main([str(argument) for argument in arguments])


@pytest.mark.slow
def test_plot_writes_beside_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("plot", run) == 0
    assert called("plot", run, "--layers") == 0
    out = [run.parent / "run.png", run.parent / "run-layers.png"]
    assert capsys.readouterr().out.splitlines() == [f"figure: {path}" for path in out]
    images = [path.read_bytes() for path in out]
    assert all(image.startswith(b"\x89PNG") for image in images)
    assert images[0] != images[1]


def words(path: Path) -> list[str]:
    """Texts of a figure in an SVG."""
    found = re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), flags=re.DOTALL)
    return [html.unescape(text).strip() for text in found]


def test_plot_until_a_step_with_a_title(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.svg"
    assert called("plot", run, "-o", out, "--until", 7, "--title", "Mine") == 0
    assert "Mine" in words(out)
    assert any("last step 7 " in word for word in words(out))
    assert called("plot", run, "-o", out) == 0
    assert "run" in words(out)
    assert any("last step 19 " in word for word in words(out))


def test_plot_panels_for_a_paper(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.svg"
    wanted = ("--panel", "Gradient norm,Loss", "--width", 3.3, "--style", "paper")
    assert called("plot", run, "-o", out, *wanted, "--single-lines") == 0
    assert {"Gradient norm", "Loss"} <= {*words(out)}
    assert "STEP SIZE" not in words(out)
    assert f'width="{3.3 * 72:g}pt"' in out.read_text()
    assert called("plot", run, "-o", out, "--panel", "Lost") == 1
    assert called("plot", run, "-o", out, "--panel", '"Gradient norm", Loss') == 0


def test_a_name_with_a_comma_stands_in_quotes(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(run.read_bytes())
    out = tmp_path / "a.svg"
    assert called("compare", run, other, "-o", out, "--labels", '"Adam, warm",SGD') == 0
    assert {"Adam, warm", "SGD"} <= {each.split(" (")[0] for each in words(out)}


@pytest.mark.slow
def test_plot_shows_progress_of_an_animation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called("plot", run, "-o", tmp_path / "a.gif", "--frames", 3, "--until", 9) == 0
    assert "3/3" in capsys.readouterr().err
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 3


def test_a_run_that_is_cut_off(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    run.write_bytes(run.read_bytes()[:-10])
    assert called("plot", run.name) == 0
    assert called("summary", run.name) == 0
    assert "run.jsonl: 19 steps, 0 to 18; the file is cut off" in capsys.readouterr().out


def test_compare(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "lr0.2" / "run.jsonl"
    other.parent.mkdir()
    realistic(5, ("Loss",)).write(other)
    monkeypatch.chdir(tmp_path)
    assert called("compare", run, other) == 0
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "figure: comparison.png"
    assert out[1] == "left out, for they are no single numbers: SpectralDensity"
    arguments = ("-o", "a.svg", "--until", 3, "--title", "Mine", "--log-steps")
    assert called("compare", run, other, *arguments) == 0
    assert {"Mine", "lr0.1", "lr0.2"} <= {*words(tmp_path / "a.svg")}
    assert any("last step 3 " in word for word in words(tmp_path / "a.svg"))


# The table ----------------------------------------------------------------------------------


def test_summary_has_the_width_of_the_terminal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    widths = []
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert called("summary", run) == 0
        lines = capsys.readouterr().out.splitlines()
        assert {"series", "Loss", "GradNorm"} <= {line.split()[0] for line in lines if line}
        widths.append(max(len(line) for line in lines if not line.startswith(str(run.parent))))
    assert widths[0] <= 80 < widths[1] <= 120


def test_summary_in_a_terminal_without_unicode(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert called("summary", run) == 0
    assert b"Loss" in printed.getvalue()


@pytest.mark.slow
def test_a_reader_that_has_seen_enough(run: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m gradlens summary {shlex.quote(str(run))} | true"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True
    )
    assert result.returncode == 0
    assert not result.stderr


# What goes wrong ----------------------------------------------------------------------------

FAILURES: dict[str, tuple[str, str]] = {
    "no file": ("plot none.jsonl", "none.jsonl: No such file"),
    "folder": ("plot lr0.1", "lr0.1 is a directory, not a run"),
    "text": ("plot text.jsonl", "text.jsonl is not a gradlens run"),
    "picture": ("summary picture.jsonl", "picture.jsonl is not a gradlens run"),
    "empty file": ("plot zero.jsonl", "zero.jsonl is empty"),
    "empty run": ("plot empty.jsonl", "empty.jsonl is empty: no step has been recorded"),
    "nothing but broken lines": (
        "summary broken.jsonl",
        "broken.jsonl is empty: no step has been recorded; line 2 is broken (Expecting property",
    ),
    "no ending": ("plot RUN -o a", "a has no ending: use one of"),
    "ending": ("plot RUN -o a.bmp", "a.bmp has the ending .bmp: use one of .png, .pdf, .svg, .gif"),
    "too early": (
        "plot RUN --until -1",
        "--until -1 is before the first step of lr0.1/run.jsonl, 0",
    ),
    "no layers": ("plot loss.jsonl --layers", "loss.jsonl: there is nothing by layer"),
    "no layers to animate": ("plot loss.jsonl --layers -o a.gif", "there is nothing by layer"),
    "nothing to draw": ("plot words.jsonl", "words.jsonl: none of the recorded series"),
    "nothing to compare": ("compare words.jsonl words2.jsonl", "none of the runs has numbers"),
    "no folder": ("plot RUN -o zero.jsonl/a.png", "zero.jsonl"),
    "given twice": ("compare RUN RUN", "lr0.1/run.jsonl is given twice"),
    "compared too early": ("compare RUN loss.jsonl --until -3", "before the first step of lr0.1"),
    "comparison to animate": ("compare RUN loss.jsonl -o a.gif", "the ending .gif: use one of"),
    "watch an animation": ("watch RUN -o a.gif", "the ending .gif: use one of .png, .pdf, .svg"),
    "watch text": ("watch text.jsonl -o a.png --interval 0.01", "is not a gradlens run"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_are_one_clear_line(
    case: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text("hello\nworld\n")
    Path("picture.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n")
    Path("zero.jsonl").touch()
    realistic(0, ("Loss",)).write("empty.jsonl")
    realistic(3, ("Loss",)).write("loss.jsonl")
    header = Path("loss.jsonl").read_text().splitlines(keepends=True)[0]
    Path("broken.jsonl").write_text(header + "{oh\n")
    for name in ("words.jsonl", "words2.jsonl"):
        wordy = History()
        wordy.append(0, {"words": "hello"})
        wordy.write(name)
    call, message = FAILURES[case]
    assert main(call.replace("RUN", "lr0.1/run.jsonl").split()) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("gradlens: ")
    assert message in line
    assert not [*tmp_path.glob("a*")]


def test_interrupted(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "write_figure", interrupt)
    assert called("plot", run) == 1
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["demo", "plot", "watch", "summary", "autopsy", "samples", "compare"]
)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: gradlens {command}" in text
    assert "None" not in text


@pytest.fixture
def spiked(tmp_path: Path) -> Path:
    """A run with two spikes, and samples with ids."""
    path = tmp_path / "spiked.jsonl"
    history = realistic(20, ("Loss",))
    suspects = (
        Suspect(3, "img_\x1b[3", share=0.99, loss=50.0, loss_share=0.9, input_ratio=88.0),
        Suspect(4, 17, share=0.01, loss=1.0, loss_share=0.02, input_ratio=1.0),
    )
    layers = {"layers": {"conv": 80.0, "fc": 3.0}, "layers_before": {"conv": 2.0, "fc": 1.0}}
    spike = Spike(10.0, 1.0, 0.1, 2.3, samples=32, suspects=suspects, back=1, rate=0.1, **layers)
    history.spikes = {7: spike, 15: replace(spike, loss=math.nan, origin="input", back=None)}
    numbers = np.arange(30, dtype=np.float32)
    whole = np.arange(30, dtype=np.int32)
    samples = Samples(19, tuple(range(30)), whole, *[numbers] * 4, whole % 3, whole % 2)
    history.samples = samples
    history.write(path)
    return path


def test_autopsy(spiked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("autopsy", spiked) == 0
    text = capsys.readouterr().out
    assert "at 2 steps" in text
    assert "NaN in the input" in text
    assert "Step 15: the loss was NaN" in text
    assert "\x1b" not in text
    assert called("autopsy", spiked, 7) == 0
    text = capsys.readouterr().out
    assert "Very likely: Sample 'img_" in text
    assert "its input is 88 times as large as that of the median sample" in text
    assert "conv 40, fc 3" in text
    assert "It was back after 1 step." in text
    assert "Learning rate: 0.1" in text


def test_autopsy_as_json(spiked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("autopsy", spiked, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in found["spikes"]] == [7, 15]
    assert found["spikes"][0]["conclusion"]["cause"] == "sample"
    assert found["spikes"][1]["loss"] is None


def test_autopsy_of_a_run_without_spikes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("autopsy", run) == 0
    assert "has not jumped" in capsys.readouterr().out
    assert called("autopsy", run, 3) == 1
    assert "no jump of the loss at step 3 (it has: at none)" in capsys.readouterr().err


def test_samples(spiked: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("samples", spiked, "--top", 3) == 0
    text = capsys.readouterr().out
    assert "30 samples until step 19" in text
    assert [line.split()[0] for line in text.splitlines()[3:6]] == ["29", "28", "27"]
    assert called("samples", spiked, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ranked"]) == 20
    assert found["ranked"][0]["id"] == 29
    assert called("samples", run) == 1
    assert "pass their ids to the context" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"gradlens {__version__}\n"


# Export -------------------------------------------------------------------------------------


def test_export_to_a_table(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "run.csv"
    assert called("export", run, "--to", "csv", out, "--until", 9, "--every", 5) == 0
    assert capsys.readouterr().out == f"exported 10 steps to csv {out}\n"
    with out.open(encoding="utf-8", newline="") as file:
        lines = [(int(line["step"]), line["name"]) for line in csv.DictReader(file)]
    assert lines == [(s, f"gradlens/{name}") for s in (0, 5) for name in ("Loss", "GradNorm")]


def test_export_of_a_layer(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = [*History.load(run)["GradNorm"][0]]
    out = tmp_path / "run.csv"
    assert called("export", run, "--to", "csv", out, "--layers", parameters[0]) == 0
    assert f"gradlens/GradNorm_{parameters[0]}," in out.read_text()
    wrong = f"{parameters[0]}x"
    assert called("export", run, "--to", "csv", tmp_path / "b.csv", "--layers", wrong) == 1
    error = capsys.readouterr().err
    assert f"the run has no numbers of '{wrong}': did you mean {parameters[0]}" in error
    assert not (tmp_path / "b.csv").exists()


def test_export_keeps_what_is_there(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.csv").write_text("precious")
    (tmp_path / "events.out.tfevents.1").write_text("precious")
    assert called("export", run, "--to", "csv", tmp_path / "run.csv") == 1
    assert "run.csv exists and is kept" in capsys.readouterr().err
    assert called("export", run, "--to", "tensorboard", tmp_path) == 1
    assert f"{tmp_path} has a run already, which is kept" in capsys.readouterr().err
    assert (tmp_path / "run.csv").read_text() == "precious"


class _LibraryError(Exception):
    """As libraries have them."""


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("__init__", _LibraryError("no account"), "csv failed: _LibraryError: no account"),
        ("record", OSError(28, "No space left"), "the sink CSV failed: OSError: [Errno 28] No"),
    ],
)
def test_export_that_fails_says_why_in_one_line(
    method: str,
    error: Exception,
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(CSV, method, fail)
    assert called("export", run, "--to", "csv", tmp_path / "run.csv") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gradlens: {message}")
