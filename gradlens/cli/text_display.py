"""Runs in a terminal: a table that is drawn again, or text that is printed when a run changes."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeAlias, final

from gradlens.cli.summary_data import as_csv, as_json
from gradlens.cli.summary_text import render
from gradlens.cli.watch import Display
from gradlens.history.history import History
from gradlens.plotting.summary import Summary, summarize

NARROWEST = 20
"""Characters of a line, at least, however narrow the terminal is."""

CLEAR, TOP, CLEAR_LINE, CLEAR_BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
"""Control sequences of terminals (ECMA-48): erase everything, go to the first line, and erase what
is behind the cursor in its line and below."""

Format: TypeAlias = Callable[[Summary, str], str]
"""Makes a text of a summary and the name of its run."""


def text_format(stream: TextIO, json: bool = False, csv: bool = False) -> Format:
    """JSON or CSV, or otherwise a table that fits in the terminal and its encoding."""
    if json:
        return as_json
    headings = itertools.chain([True], itertools.repeat(False))

    def table(summary: Summary, run: str) -> str:
        if csv:
            return encodable(as_csv(summary, run, next(headings)), stream)
        width = max(NARROWEST, shutil.get_terminal_size().columns)
        text = render(summary, width, run)
        is_printable = encodable(text, stream) == text
        return text if is_printable else render(summary, width, run, plain=True)

    return table


def text_display(stream: TextIO, text_of: Format, redraws: bool) -> Display:
    """A display on a stream, which is redrawn if that is a terminal and ``redraws`` is true."""
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return RedrawnText(stream, text_of) if redraws and is_terminal else PrintedText(stream, text_of)


def encodable(text: str, stream: TextIO) -> str:
    """A text with ``\\u`` escapes for the characters that a stream can't encode."""
    encoding = stream.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


@final
class PrintedText(Display):
    """Prints a run each time it has changed."""

    def __init__(self, stream: TextIO, text_of: Format) -> None:
        self._stream = stream
        self._text_of = text_of

    def show(self, path: Path, history: History) -> None:
        print(self._text_of(summarize(history), str(path)), file=self._stream, flush=True)


@final
class RedrawnText(Display):
    """Runs one below the other, in the place of what was drawn before."""

    def __init__(self, stream: TextIO, text_of: Format) -> None:
        self._stream = stream
        self._text_of = text_of
        self._summaries: dict[Path, Summary] = {}
        self._size: os.terminal_size | None = None

    def show(self, path: Path, history: History) -> None:
        self._summaries[path] = summarize(history)
        self._draw()

    def wait(self, seconds: float) -> bool:
        is_open = super().wait(seconds)
        if self._summaries and shutil.get_terminal_size() != self._size:
            self._draw()
        return is_open

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        texts = [self._text_of(each, str(path)) for path, each in self._summaries.items()]
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
