"""Files of figures, figures in notebooks, and a progress bar in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from gradlens.history.run_file import replacing
from gradlens.instruments.axes import TextFigure

FIGURES = (".png", ".pdf", ".svg")
DPI = 200


def check_suffix(path: Path, known: Sequence[str]) -> str:
    """The ending of a file in lower case; ``ValueError`` lists the known ones."""
    suffix = path.suffix.lower()
    if suffix not in known:
        wrong = f"the ending {path.suffix}" if suffix else "no ending"
        raise ValueError(f"{path} has {wrong}: use one of {', '.join(known)}")
    return suffix


def write_figure(figure: Figure, path: Path, options: Mapping[str, Any] = {}) -> None:
    """Write a figure in the format that the ending of ``path`` says; folders are made.

    ``options`` are passed to ``Figure.savefig``.
    """
    usual: dict[str, Any] = {"format": path.suffix.lower().removeprefix("."), "dpi": DPI}
    with replacing(path) as partial:
        figure.savefig(partial, **usual | {"facecolor": figure.get_facecolor()} | {**options})


class NotebookFigure(TextFigure):
    """A figure that is displayed once in each cell.

    In a notebook, pyplot displays a figure when it is shown, and the notebook displays the result
    of a cell's last line, which may be the same figure.
    """

    _cell: int | None = None
    """The cell in which the figure was displayed last."""

    def _ipython_display_(self) -> None:
        """Called by IPython, which displays the figure as any other on ``NotImplementedError``."""
        cell = import_module("IPython").get_ipython().execution_count
        if cell != self._cell:
            self._cell = cell
            raise NotImplementedError


WIDTH = 30


def progress(steps: Sequence[int], label: str) -> Iterator[int]:
    """The steps, while drawing a bar; without a terminal, a line for each tenth."""
    stream, start, total = sys.stderr, time.monotonic(), len(steps)
    live = stream.isatty()
    for done, step in enumerate(steps, 1):
        yield step
        filled, left = WIDTH * done // total, (time.monotonic() - start) / done * (total - done)
        blocks = "█" * filled + "░" * (WIDTH - filled)
        bar = f"{label} {blocks} {done}/{total}, {left:3.0f} s left"
        if live:
            stream.write("\r" + bar + ("\n" if done == total else ""))
            stream.flush()
        elif done * 10 // total > (done - 1) * 10 // total:
            stream.write(bar + "\n")
