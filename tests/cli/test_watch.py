"""Watching a run while it is being written."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradlens.cli import watch as watching
from gradlens.cli.watch import Display, WindowDisplay, watch
from gradlens.history.history import History
from gradlens.history.records import Note
from gradlens.plotting.screen import Screen
from tests.instruments.test_instruments import realistic

PATIENCE = 60.0
"""Seconds after which something that should have happened won't."""


class Script(Display):
    """Does something to the file at each wait, and keeps what it was shown."""

    def __init__(self, *events: Callable[[], Any], needs: str = "") -> None:
        self.events = [*events]
        self.needs = needs
        self.shown: list[tuple[int, ...]] = []
        self.waits: list[float] = []

    def lacks(self, history: History) -> str:
        return "" if self.needs in ("", *history.names) else f"there is no {self.needs}"

    def show(self, path: Path, history: History) -> None:
        self.shown.append(history.steps)

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if not self.events:
            return False
        self.events.pop(0)()
        return True


def content(history: History, tmp_path: Path) -> bytes:
    """The file of a run."""
    path = tmp_path / "whole.jsonl"
    path.unlink(missing_ok=True)
    history.write(path)
    return path.read_bytes()


def nothing() -> None:
    """An event that is none."""


def watched(path: Path, *events: Callable[[], Any], needs: str = "") -> tuple[Script, str]:
    """What is shown, and said, while the events happen."""
    display, stream = Script(*events, needs=needs), io.StringIO()
    watch([path], display, 0.5, stream)
    return display, stream.getvalue()


# When it draws ------------------------------------------------------------------------------


def test_draws_again_only_when_the_file_has_grown(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = content(realistic(10, ("Loss",)), tmp_path)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]))

    def grow() -> None:
        path.write_bytes(path.read_bytes() + b"".join(lines[5:7]))

    display, said = watched(path, nothing, nothing, grow, nothing)
    assert display.shown == [tuple(range(4)), tuple(range(6))]
    assert said == ""


def test_a_run_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    header, first, *_ = content(realistic(3, ("Loss",)), tmp_path).splitlines(keepends=True)
    events = [lambda: path.touch(), lambda: path.write_bytes(header)]
    display, said = watched(path, nothing, *events, lambda: path.write_bytes(header + first))
    assert display.shown == [(0,)]
    waiting = [f"gradlens: waiting for {path}", f"gradlens: waiting for the first step of {path}"]
    assert said.splitlines() == waiting


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = content(realistic(3, ("Loss",)), tmp_path)
    path.write_bytes(whole[:-10])
    display, said = watched(path, lambda: path.write_bytes(whole))
    assert display.shown == [(0, 1), (0, 1, 2)]
    assert said == ""


def test_a_file_that_is_half_written_gets_a_second_chance(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = content(realistic(3, ("Loss",)), tmp_path)
    path.write_bytes(whole[:20])
    display, _ = watched(
        path, lambda: path.write_bytes(whole[:30]), lambda: path.write_bytes(whole)
    )
    assert display.shown == [(0, 1, 2)]


@pytest.mark.parametrize("words", ["hello", '{"a": 1}\n', '{"gradlens_run": 99}\n'])
def test_what_is_no_run_and_stays_so(tmp_path: Path, words: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(words)
    with pytest.raises(ValueError, match=r"run\.jsonl"):
        watched(path, nothing, nothing)


def test_a_run_that_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content(realistic(5, ("Loss",)), tmp_path))
    short = content(realistic(2, ("Loss",)), tmp_path)
    display, said = watched(path, path.unlink, lambda: path.write_bytes(short))
    assert display.shown == [tuple(range(5)), (0, 1)]
    assert "waiting" in said


def test_what_was_asked_for_may_come_late(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content(realistic(2, ("Loss",)), tmp_path))
    later = content(realistic(2, ("Loss", "GradNorm")), tmp_path)
    display, said = watched(path, nothing, lambda: path.write_bytes(later), needs="GradNorm")
    assert len(display.shown) == 1
    assert said.count("waiting for something to draw") == 1


def test_notes_alone_are_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content(History(notes=[Note(0, "hm")]), tmp_path))
    display, said = watched(path, nothing)
    assert display.shown == []
    assert "first step" in said


def test_a_slow_drawing_takes_half_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content(realistic(2, ("Loss",)), tmp_path))
    clock = iter([0.0, 7.0, 20.0, 20.1])
    monkeypatch.setattr(watching.time, "monotonic", lambda: next(clock))
    display, _ = watched(path, nothing)
    assert display.waits == [7.0, 0.5]


# Files --------------------------------------------------------------------------------------


# In a process of its own --------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another process."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_interrupted_from_the_keyboard(tmp_path: Path) -> None:
    run, image = tmp_path / "run.jsonl", tmp_path / "now.png"
    command = [sys.executable, "-m", "gradlens", "watch", str(run), "-o", str(image)]
    with subprocess.Popen(
        [*command, "--interval", "0.05"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Tests that run in the background ignore interrupts, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == f"gradlens: waiting for {run}\n"
            realistic(3, ("Loss",)).write(run)
            until(image.exists)
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in error
    assert image.read_bytes().startswith(b"\x89PNG")


# Windows ------------------------------------------------------------------------------------


class Canvas(FigureCanvasAgg):
    """A canvas that believes to be in a window."""

    required_interactive_framework = "none that exists"

    def __init__(self, figure: Figure) -> None:
        super().__init__(figure)
        self.loops: list[float] = []
        self.stops = 0

    def start_event_loop(self, timeout: float = 0) -> None:
        self.loops.append(timeout)

    def stop_event_loop(self) -> None:
        self.stops += 1


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Figure:
    """A figure that is taken for a window's."""
    figure = Figure()
    figure.set_canvas(Canvas(figure))
    monkeypatch.setattr(watching, "windowed", lambda old: figure)
    monkeypatch.setattr(watching, "show", lambda figures, block: None)
    return figure


def test_a_window_is_redrawn_in_its_size_until_it_is_closed(tmp_path: Path, window: Figure) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content(realistic(3, ("Loss",)), tmp_path))
    display = WindowDisplay(Screen("A run"))
    canvas = window.canvas
    assert isinstance(canvas, Canvas)
    display.show(path, History.load(path))
    assert display.wait(0.25)
    assert canvas.loops == [0.25]
    window.set_size_inches(9, 9)
    display.show(path, History.load(path))
    assert tuple(window.get_size_inches()) == (9, 9)
    assert len(window.axes) == 1
    canvas.callbacks.process("close_event", None)
    assert canvas.stops == 1
    watch([path], display, 0.01, io.StringIO())


def test_without_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "windowed", lambda old: Figure())
    with pytest.raises(OSError, match="no display for a window: draw to a file with -o FILE"):
        WindowDisplay(Screen("A run"))
