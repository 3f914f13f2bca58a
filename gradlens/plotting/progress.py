"""A progress bar for the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TextIO

WIDTH = 30


def progress(total: int, label: str, stream: TextIO | None = None) -> Iterator[int]:
    """Count to ``total`` while drawing a bar; without a terminal, a line for each tenth."""
    stream = sys.stderr if stream is None else stream
    live, start = stream.isatty(), time.monotonic()
    for done in range(total):
        yield done
        last = done + 1 == total
        if live:
            stream.write("\r" + _bar(done + 1, total, label, start) + ("\n" if last else ""))
            stream.flush()
        elif last or (done + 1) * 10 // total > done * 10 // total:
            stream.write(_bar(done + 1, total, label, start) + "\n")


def _bar(done: int, total: int, label: str, start: float) -> str:
    filled = WIDTH * done // total
    left = (time.monotonic() - start) / done * (total - done)
    return f"{label} {'█' * filled}{'░' * (WIDTH - filled)} {done}/{total}, {left:3.0f} s left"
