"""Files that are whole, or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

FIGURES = (".png", ".pdf", ".svg")
DPI = 200


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` once that has succeeded.

    A reader of ``path`` gets the old file or the new one, never a part. Folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, where renaming is atomic; the suffix says which format is written.
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_suffix(path: Path, known: Sequence[str]) -> str:
    """The ending of a file in lower case; ``ValueError`` lists the known ones."""
    suffix = path.suffix.lower()
    if suffix not in known:
        wrong = f"the ending {path.suffix}" if suffix else "no ending"
        raise ValueError(f"{path} has {wrong}: use one of {', '.join(known)}")
    return suffix


def text_as_text() -> AbstractContextManager[None]:
    """While files are written, their texts can be searched, copied and edited."""
    return matplotlib.rc_context({"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"})


class TextFigure(Figure):
    """A figure whose PDF, PostScript and SVG files have texts instead of outlines of letters."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """As that of any figure."""
        with text_as_text():
            super().savefig(*args, **kwargs)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the ending of ``path`` says."""
    suffix = check_suffix(path, FIGURES)
    with replacing(path) as partial, text_as_text():
        color = figure.get_facecolor()
        figure.savefig(partial, format=suffix.removeprefix("."), dpi=DPI, facecolor=color)
