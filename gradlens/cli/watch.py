"""Show runs again and again while they are being written."""

from __future__ import annotations

import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, final

from matplotlib.figure import Figure

from gradlens.history.history import History
from gradlens.instruments.style import PAPER
from gradlens.plotting.loading import FollowedRun
from gradlens.plotting.output import FIGURES, check_suffix, write_figure
from gradlens.plotting.plotter import show, windowed
from gradlens.plotting.screen import Screen


class Display(ABC):
    """Where runs are shown."""

    def lacks(self, history: History) -> str:
        """What a run must have before it can be shown; by default, nothing."""
        return ""

    @abstractmethod
    def show(self, path: Path, history: History) -> None:
        """Show a run as it is now."""

    def wait(self, seconds: float) -> bool:
        """Let time pass; whether the display is still open."""
        time.sleep(seconds)
        return True


class FigureDisplay(Display):
    """A display of a screen's figure."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def lacks(self, history: History) -> str:
        return self._screen.lacks(history)


@final
class FileDisplay(FigureDisplay):
    """An image that is replaced as a whole; ``ValueError`` for an unknown ending."""

    def __init__(self, path: Path, screen: Screen) -> None:
        super().__init__(screen)
        check_suffix(path, FIGURES)
        self.path = path

    def show(self, path: Path, history: History) -> None:
        figure = Figure(facecolor=PAPER)
        self._screen.draw(history, figure)
        write_figure(figure, self.path)


@final
class WindowDisplay(FigureDisplay):
    """A window; ``OSError`` if there can't be one."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
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

    It waits for a file that doesn't exist yet, for the first step, and for what the display needs,
    and says so on ``stream``, by default stderr. ``ValueError`` if a file is no run and doesn't
    change.
    """
    runs = [_WatchedRun(path, display, sys.stderr if stream is None else stream) for path in paths]
    is_open = True
    while is_open:
        started = time.monotonic()
        for run in runs:
            run.show_changes()
        # A long run takes long to show: no more than half of the time.
        is_open = display.wait(max(interval, time.monotonic() - started))


class _WatchedRun:
    """A run's file, which may grow, and what was seen of it."""

    def __init__(self, path: Path, display: Display, stream: TextIO) -> None:
        self._path = path
        self._display = display
        self._stream = stream
        self._run = FollowedRun(path)
        self._news = ""

    def show_changes(self) -> None:
        """Show the run if its file has changed; print what it waits for, once."""
        with warnings.catch_warnings(record=True) as caught:
            awaited = self._run.look()
            news = self._show(self._run.history) if awaited == "" else awaited
        news = news or "; ".join(str(each.message) for each in caught)
        if news and news != self._news:
            print(f"gradlens: {news}", file=self._stream, flush=True)
            self._news = news

    def _show(self, history: History) -> str:
        """Show the run if that is possible, and say otherwise what is missing."""
        lacks = self._display.lacks(history)
        if lacks:
            return f"waiting for something to draw in {self._path}: {lacks}"
        try:
            self._display.show(self._path, history)
        except OSError:  # of the image, or of the terminal
            raise
        except Exception as error:
            return f"{self._path} can't be shown ({type(error).__name__}: {error})"
        return ""
