"""Draw a run again and again while it is being written."""

from __future__ import annotations

import sys
import time
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TextIO, final

from matplotlib.figure import Figure

from gradlens.history.history import History
from gradlens.instruments.style import PAPER
from gradlens.plotting.loading import GrowingRun
from gradlens.plotting.output import FIGURES, check_suffix, write_figure
from gradlens.plotting.plotter import show, windowed
from gradlens.plotting.screen import Screen


class Display(ABC):
    """Where a run is shown."""

    @abstractmethod
    def show(self, history: History, screen: Screen) -> None:
        """Draw the run as it is now."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Let time pass; whether anybody is still looking."""


@final
class FileDisplay(Display):
    """An image that is replaced as a whole; ``ValueError`` for an unknown ending."""

    def __init__(self, path: Path) -> None:
        check_suffix(path, FIGURES)
        self.path = path

    def show(self, history: History, screen: Screen) -> None:
        figure = Figure(facecolor=PAPER)
        screen.draw(history, figure)
        write_figure(figure, self.path)

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return True


@final
class WindowDisplay(Display):
    """A window; ``OSError`` if there can't be one."""

    def __init__(self) -> None:
        self._figure = windowed(None)
        self._empty = True
        self._open = True
        if self._figure.canvas.required_interactive_framework is None:
            raise OSError("there is no display for a window: draw to a file with -o FILE")
        self._figure.canvas.mpl_connect("close_event", self._close)

    def show(self, history: History, screen: Screen) -> None:
        # A window keeps the size that somebody gave it.
        screen.draw(history, self._figure, resize=self._empty)
        self._empty = False
        show([self._figure], block=False)

    def wait(self, seconds: float) -> bool:
        self._figure.canvas.start_event_loop(seconds)
        return self._open

    def _close(self, _: Any) -> None:
        self._open = False
        self._figure.canvas.stop_event_loop()


def watch(
    path: Path,
    screen: Screen,
    display: Display,
    interval: float,
    stream: TextIO | None = None,
) -> None:
    """Show a run whenever its file has changed, until its display is closed.

    It waits for a file that doesn't exist yet, for the first step, and for something to draw, and
    says so on ``stream``, by default stderr. ``ValueError`` if the file is no run and doesn't
    change.
    """
    stream = sys.stderr if stream is None else stream
    run = GrowingRun(path)
    seen, broken, told = 0, 0, ""
    looking = True
    while looking:
        started = time.monotonic()
        size, news = _size(path), ""
        if not size:
            news = f"waiting for {path}"
        elif size != seen:
            try:
                with warnings.catch_warnings(record=True) as caught:
                    news = _show(path, run.read(), screen, display)
            except ValueError:
                # It may be in the midst of being written, but then it grows.
                if size == broken:
                    raise
                broken = size
            else:
                seen, news = size, news or "; ".join(str(each.message) for each in caught)
        if news and news != told:
            print(f"gradlens: {news}", file=stream, flush=True)
            told = news
        # A long run takes long to draw: no more than half of the time.
        looking = display.wait(max(interval, time.monotonic() - started))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _show(path: Path, history: History, screen: Screen, display: Display) -> str:
    """Show a run if there is something to show, and say otherwise what is missing."""
    if not history.steps:
        return f"waiting for the first step of {path}"
    try:
        screen.panels(history)
    except ValueError as reason:
        return f"waiting for something to draw in {path}: {reason}"
    try:
        display.show(history, screen)
    except OSError:  # of the image
        raise
    except Exception as error:
        return f"{path} can't be drawn ({type(error).__name__}: {error})"
    return ""
