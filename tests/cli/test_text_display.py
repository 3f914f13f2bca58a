"""Runs in a terminal, and as data for other programs."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradlens import History, Undefined
from gradlens.cli import watch as watching
from gradlens.cli.main import main
from gradlens.cli.watch import TextDisplay, panels_format, summary_format
from gradlens.history.records import Spending
from gradlens.plotting.screen import Screen, main_parts, panels
from tests.instruments.test_instruments import realistic


class Terminal(io.StringIO):
    """A stream that is a terminal of a size of the tests' own."""

    encoding = "utf-8"
    size = os.terminal_size((80, 24))

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: found.size)
    monkeypatch.setenv("TERM", "xterm")
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    realistic(20, ("Loss", "GradNorm", "SpectralDensity")).write(path)
    return path


def called(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def screen_of(text: str, height: int) -> list[str]:
    """What a terminal shows after a text with the control sequences that are used."""
    lines, row = [""] * height, 0
    for part in text.rpartition("\x1b[2J")[2].replace("\x1b", "\0\x1b").split("\0"):
        for sequence in ("\x1b[H", "\x1b[K", "\x1b[J"):
            if not part.startswith(sequence):
                continue
            part = part.removeprefix(sequence)
            if sequence == "\x1b[H":
                row = 0
            elif sequence == "\x1b[J":
                lines[row:] = [""] * (height - row)
        for sign in part.splitlines(keepends=True):
            # Each line is written from its beginning, and erased to its end afterwards.
            if sign.strip("\n"):
                lines[row] = sign.strip("\n")
            row += sign.endswith("\n")
            assert row < height, "the terminal has scrolled"
    return lines


# Terminals ----------------------------------------------------------------------------------


def test_a_terminal_shows_what_is_known_by_now(terminal: Terminal) -> None:
    display = TextDisplay(terminal, summary_format(), redraws=True)
    display.show(Path("a.jsonl"), realistic(3, ("Loss", "GradNorm")))
    display.show(Path("a.jsonl"), realistic(5, ("Loss",)))
    display.show(Path("b.jsonl"), realistic(2, ("Loss",)))
    shown = screen_of(terminal.getvalue(), 24)
    assert [line for line in shown if "steps," in line] == [
        "a.jsonl: 5 steps, 0 to 4",
        "b.jsonl: 2 steps, 0 to 1",
    ]
    assert not any("GradNorm" in line for line in shown)


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (20, 3), (160, 50)])
def test_a_terminal_never_scrolls(terminal: Terminal, size: tuple[int, int]) -> None:
    display = TextDisplay(terminal, summary_format(), redraws=True)
    display.show(Path("a.jsonl"), realistic(3, ("Loss",)))
    terminal.size = os.terminal_size(size)
    for _ in range(2):
        display.show(Path("a.jsonl"), realistic(3))
    shown = screen_of(terminal.getvalue(), size[1])
    if size[1] < 40:
        assert "more lines" in [line for line in shown if line][-1]


@pytest.mark.parametrize(("stream", "term"), [(Terminal(), "dumb"), (io.StringIO(), "xterm")])
def test_what_is_no_terminal_gets_no_control_sequences(
    stream: io.StringIO, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    display = TextDisplay(stream, summary_format(), redraws=True)
    for steps in (2, 3):
        display.show(Path("a.jsonl"), realistic(steps, ("Loss",)))
    assert stream.getvalue().count("a.jsonl: ") == 2
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("width", [20, 30, 40, 80, 160])
def test_names_are_never_cut(terminal: Terminal, width: int) -> None:
    terminal.size = os.terminal_size((width, 24))
    history = realistic(5, ("Loss", "GradNorm"))
    history.append(0, {"A series with a long name (evaluation)": 1.5, "LongerThanAnyLine" * 3: 2.5})
    TextDisplay(terminal, summary_format()).show(Path("run"), history)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    together = "".join("".join(line.split()) for line in lines)
    for name in history.names:
        assert "".join(name.split()) in together
    assert sum(line.split()[-1:] == ["1.5"] or " 1.5 " in line for line in lines) == 1


# Following ----------------------------------------------------------------------------------


def follow(
    monkeypatch: pytest.MonkeyPatch, arguments: list[object], *events: Callable[[], Any]
) -> int:
    """The exit code of a call that is interrupted after some events, of which each is a wait."""
    remaining = [*events]

    def sleep(seconds: float) -> None:
        if not remaining:
            raise KeyboardInterrupt
        remaining.pop(0)()

    monkeypatch.setattr(watching.time, "sleep", sleep)
    return called(*arguments)


def test_a_run_that_grows_is_followed(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run.read_bytes().splitlines(keepends=True)
    live, other = tmp_path / "live.jsonl", tmp_path / "other.jsonl"
    live.write_bytes(b"".join(lines[:5]))
    events: list[Callable[[], Any]] = [
        lambda: other.write_bytes(run.read_bytes()),
        lambda: None,
        lambda: live.write_bytes(run.read_bytes()),
    ]
    arguments: list[object] = ["summary", live, other, "--json", "--follow"]
    assert follow(monkeypatch, arguments, *events) == 0
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert [(one["run"], one["steps"]) for one in found] == [
        (str(live), 4),
        (str(other), 20),
        (str(live), 20),
    ]
    assert printed.err == f"gradlens: waiting for {other}\n"


def test_csv_that_is_followed_has_one_heading(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = run.read_bytes()
    run.write_bytes(b"".join(content.splitlines(keepends=True)[:4]))
    assert (
        follow(monkeypatch, ["summary", run, "--csv", "--follow"], lambda: run.write_bytes(content))
        == 0
    )
    rows = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert [row["step"] for row in rows if row["series"] == "Loss"] == ["2", "19"]


def test_watch_in_a_pipe_prints_the_panels_for_each_change(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = run.read_bytes()
    run.write_bytes(b"".join(content.splitlines(keepends=True)[:4]))
    monkeypatch.setenv("COLUMNS", "200")
    arguments: list[object] = ["watch", run, "--text"]
    assert follow(monkeypatch, arguments, lambda: run.write_bytes(content), lambda: None) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"{run}: ") == 2
    assert "3 recorded steps" in printed
    assert "20 recorded steps" in printed
    assert printed.count("Hessian spectral density") == 2


@pytest.mark.parametrize("width", [20, 60, 200])
def test_all_panels_fit_into_a_terminal(terminal: Terminal, width: int) -> None:
    terminal.size = os.terminal_size((width, 24))
    for layers in (False, True):
        screen = Screen("", layers=layers)
        TextDisplay(terminal, panels_format(screen)).show(Path("a.jsonl"), realistic(30))
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    titles = {panel.title for panel in panels(main_parts(realistic(30)), realistic(30))}
    if width == 200:
        assert all(any(title in line for line in lines) for title in titles)


# Data ---------------------------------------------------------------------------------------


@pytest.fixture
def peculiar(tmp_path: Path) -> Path:
    """A run with what JSON and CSV have no words for."""
    history = realistic(4, ("Loss",))
    history.append(3, {"missing": Undefined("no loss, was passed"), "infinite": float("inf")})
    history.append(3, {"λ": 2.0})
    history.spending = Spending(0.05, 0.04, 0.001, 0.5, {"HessTrace": 2, "Alpha": 0})
    path = tmp_path / "peculiar.jsonl"
    history.write(path)
    return path


def test_json(run: Path, peculiar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("summary", run, peculiar, "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    history = History.load(run)
    (loss,) = (one for one in first["series"] if one["series"] == "Loss")
    assert loss["last"] == history["Loss"][19]
    assert loss["max"] == max(history["Loss"].values())
    assert history["Loss"][loss["max_step"]] == loss["max"]
    assert first["without_single_numbers"] == {"SpectralDensity": 2}
    assert first["spending"] is None
    series = {one["series"]: one for one in second["series"]}
    assert series["missing"]["last"] is None
    assert series["missing"]["reason"] == "no loss, was passed"
    assert float(series["infinite"]["last"]) == float("inf")
    assert second["spending"]["taken"] == 0.04
    assert second["spending"]["turns"]["Alpha"] == 0


def test_csv(run: Path, peculiar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("summary", run, peculiar, "--csv") == 0
    rows = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    by_name = {(row["run"], row["series"]): row for row in rows}
    assert float(by_name[str(run), "Loss"]["last"]) == History.load(run)["Loss"][19]
    missing = by_name[str(peculiar), "missing"]
    assert (missing["last"], missing["reason"]) == ("", "no loss, was passed")
    assert float(by_name[str(peculiar), "infinite"]["last"]) == float("inf")
    assert (str(peculiar), "λ") in by_name


def test_several_tables(
    run: Path, peculiar: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert called("summary", run, peculiar) == 0
    printed = capsys.readouterr().out
    assert f"\n\n{peculiar}: 4 steps" in printed
    assert "tracking took 4 % of the time, of a budget of 5 %" in printed
    assert "tracking a step takes 500 plain steps\n  HessTrace: 2 steps" in printed
    assert "Alpha: no steps" in printed


# Completion ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"), [("gradlens su", {"summary "}), ("gradlens summary a --f", {"--follow "})]
)
def test_a_shell_completes_commands(tmp_path: Path, line: str, expected: set[str]) -> None:
    pytest.importorskip("argcomplete")
    out = tmp_path / "completions"
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    program = "import sys; from gradlens.cli.main import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", program], env=os.environ | environment, check=True)
    assert set(out.read_text().splitlines()) == expected
