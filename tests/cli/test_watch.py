"""Watching a run while it is being written."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradlens.cli import watch as watching
from gradlens.cli.watch import Display, WindowDisplay, panels_format, watch
from gradlens.history.history import History
from gradlens.history.records import Note
from gradlens.plotting.screen import Screen
from tests.instruments.test_instruments import realistic

PATIENCE = 60.0
"""Seconds after which something that should have happened won't."""


class Script(Display):
    """Does something to the file at each wait, and keeps what it was shown."""

    def __init__(self, *events: Callable[[], Any]) -> None:
        self.events = [*events]
        self.shown: list[tuple[int, ...]] = []
        self.waits: list[float] = []

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


def watched(path: Path, *contents: bytes | None) -> tuple[Script, list[str]]:
    """What is shown, and said, while the file has these contents one after the other, or isn't."""

    def change(content: bytes | None) -> None:
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content)

    first, *others = contents
    change(first)
    display = Script(*(partial(change, each) for each in others))
    stream = io.StringIO()
    watch([path], display, 0.5, stream)
    return display, stream.getvalue().splitlines()


def contents_of(tmp_path: Path) -> dict[str, tuple[list[bytes | None], list[int], list[str]]]:
    """Contents of a file one after the other, how many steps are shown, and what is said."""
    whole = content(realistic(6, ("Loss",)), tmp_path)
    lines = whole.splitlines(keepends=True)
    header, grown = lines[0], b"".join(lines[:5])
    notes = content(History(notes=[Note(0, "hm")]), tmp_path)
    short = content(realistic(2, ("Loss",)), tmp_path)
    no_file, no_step = "waiting for FILE", "waiting for the first step of FILE"
    return {
        "it grows": ([grown, grown, grown, whole, whole], [4, 6], []),
        "it is waited for": ([None, None, b"", header, grown], [4], [no_file, no_step]),
        "a line is being written": ([whole[:-10], whole], [5, 6], []),
        "the header is being written": ([whole[:20], whole[:30], whole], [6], [no_step]),
        "it starts anew": ([whole, None, short], [6, 2], [no_file]),
        "notes alone are no steps": ([notes, notes], [], [no_step]),
    }


CASES = (
    "it grows", "it is waited for", "a line is being written", "the header is being written",
    "it starts anew", "notes alone are no steps",
)  # fmt: skip


# When it draws ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_it_draws_when_the_file_has_new_steps(case: str, tmp_path: Path) -> None:
    contents, shown, said = contents_of(tmp_path)[case]
    path = tmp_path / "run.jsonl"
    display, lines = watched(path, *contents)
    assert display.shown == [tuple(range(steps)) for steps in shown]
    assert lines == [f"gradlens: {text.replace('FILE', str(path))}" for text in said]


def test_what_was_asked_for_may_come_late() -> None:
    text_of = panels_format(Screen("A run", layers=True))
    assert "nothing by layer or parameter" in text_of(realistic(2, ("Loss",)), "run.jsonl")
    assert "Gradient norm by parameter" in text_of(realistic(2, ("GradNorm",)), "run.jsonl")


def test_a_slow_drawing_takes_half_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 7.0, 20.0, 20.1])
    monkeypatch.setattr(watching.time, "monotonic", lambda: next(clock))
    run = content(realistic(2, ("Loss",)), tmp_path)
    display, _ = watched(tmp_path / "run.jsonl", run, run)
    assert display.waits == [7.0, 0.5]


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
