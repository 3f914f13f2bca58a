"""Show runs again and again while they are being written: in a window, a file, or a terminal."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeAlias, final

from gradlens.cli.panels_text import panels_text
from gradlens.cli.summary_text import as_csv, as_json, findings_text, render
from gradlens.history.history import History
from gradlens.instruments.axes import TextFigure
from gradlens.plotting.loading import GrowingRun
from gradlens.plotting.output import FIGURES, check_suffix, write_figure
from gradlens.plotting.plotter import show, windowed
from gradlens.plotting.screen import Screen, words_of
from gradlens.plotting.summary import summarize


class Display(ABC):
    """Where runs are shown."""

    @abstractmethod
    def show(self, path: Path, history: History) -> None:
        """Show a run as it is now."""

    def wait(self, seconds: float) -> bool:
        """Let time pass; whether the display is still open."""
        time.sleep(seconds)
        return True


@final
class FileDisplay(Display):
    """An image that is replaced as a whole; ``ValueError`` for an unknown ending."""

    def __init__(self, path: Path, screen: Screen) -> None:
        check_suffix(path, FIGURES)
        self._path, self._screen = path, screen

    def show(self, path: Path, history: History) -> None:
        figure = TextFigure()
        self._screen.draw(history, figure)
        write_figure(figure, self._path)


@final
class WindowDisplay(Display):
    """A window; ``OSError`` if there can't be one."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._figure = windowed(None)
        self._empty = True
        self._open = True
        if self._figure.canvas.required_interactive_framework is None:
            raise OSError("there is no display for a window: draw to a file with -o FILE")
        self._figure.canvas.mpl_connect("close_event", self._close)

    def show(self, path: Path, history: History) -> None:
        # A window keeps the size that the user gave it.
        self._screen.draw(history, self._figure, resize=self._empty)
        self._empty = False
        show([self._figure], block=False)

    def wait(self, seconds: float) -> bool:
        self._figure.canvas.start_event_loop(seconds)
        return self._open

    def _close(self, _: Any) -> None:
        self._open = False
        self._figure.canvas.stop_event_loop()


def watch(
    paths: Sequence[Path], display: Display, interval: float, stream: TextIO | None = None
) -> None:
    """Show runs whenever their files have changed, until the display is closed.

    It waits for a file that doesn't exist yet, and for the first step, and says so on ``stream``,
    by default stderr. ``ValueError`` if a file is no run and doesn't change.
    """
    runs, news = {path: GrowingRun(path) for path in paths}, dict.fromkeys(paths, "")
    is_open = True
    while is_open:
        started = time.monotonic()
        for path, run in runs.items():
            with warnings.catch_warnings(record=True) as caught:
                awaited = run.look()
                found = _show(display, path, run.history) if awaited == "" else awaited
            found = found or "; ".join(str(each.message) for each in caught)
            if found and found != news[path]:
                print(f"gradlens: {found}", file=stream or sys.stderr, flush=True)
                news[path] = found
        # A long run takes long to show: no more than half of the time.
        is_open = display.wait(max(interval, time.monotonic() - started))


def _show(display: Display, path: Path, history: History) -> str:
    """Show a run if that is possible, and say otherwise why not."""
    try:
        display.show(path, history)
    except OSError:  # of the image, or of the terminal
        raise
    except Exception as error:
        return f"{path} can't be shown ({type(error).__name__}: {error})"
    return ""


# In a terminal ------------------------------------------------------------------------------

NARROWEST = 20
"""Characters of a line, at least, however narrow the terminal is."""

CLEAR, TOP, CLEAR_LINE, CLEAR_BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
"""Control sequences of terminals (ECMA-48): erase everything, go to the first line, and erase what
is behind the cursor in its line and below."""

Format: TypeAlias = Callable[[History, str], str]
"""Makes a text of a run and its name."""


def width() -> int:
    """Characters of a line in the terminal."""
    return max(NARROWEST, shutil.get_terminal_size().columns)


def summary_format(json: bool = False, csv: bool = False) -> Format:
    """A summary as JSON or CSV, or otherwise as a table that fits in the terminal."""
    headings = itertools.chain([True], itertools.repeat(False))

    def text(history: History, run: str) -> str:
        summary = summarize(history)
        if json:
            return as_json(summary, run)
        return as_csv(summary, run, next(headings)) if csv else render(summary, width(), run)

    return text


def panels_format(screen: Screen) -> Format:
    """The panels of a screen, and what is wrong with the run."""

    def text(history: History, run: str) -> str:
        words = f"{run}: {' · '.join(words_of(history, '').facts)}"
        panels = screen.panels(history)
        drawn = panels_text(panels, words if panels else f"{run}: {screen.lacks(history)}", width())
        wrong = findings_text(screen.marked(history), run, width())
        return "\n".join([drawn, *(["", *wrong] if wrong else [])])

    return text


@final
class TextDisplay(Display):
    """Prints a run each time it has changed.

    With ``redraws``, in a terminal, runs are one below the other in the place of what was drawn
    before.
    """

    def __init__(self, stream: TextIO, text_of: Format, redraws: bool = False) -> None:
        self._stream = stream
        self._text_of = text_of
        self._redraws = redraws and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._runs: dict[Path, History] = {}
        self._size: os.terminal_size | None = None

    def show(self, path: Path, history: History) -> None:
        self._runs[path] = history
        if self._redraws:
            self._draw()
        else:
            print(self._text_of(history, str(path)), file=self._stream, flush=True)

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        texts = [self._text_of(each, str(path)) for path, each in self._runs.items()]
        # The cursor stays in the last line.
        lines = cut("\n\n".join(texts).splitlines(), size.lines - 1)
        start = TOP if size == self._size else CLEAR + TOP
        drawn = "".join(f"{line}{CLEAR_LINE}\n" for line in lines)
        self._stream.write(f"{start}{drawn}{CLEAR_BELOW}")
        self._stream.flush()
        self._size = size


def cut(lines: list[str], height: int) -> list[str]:
    """The first lines, and how many there are besides, if there are more than ``height``."""
    if len(lines) <= height:
        return lines
    shown = max(height - 1, 1)
    return [*lines[:shown], f"({len(lines) - shown} more lines)"]
