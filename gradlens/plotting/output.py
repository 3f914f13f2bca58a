"""Files of figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from gradlens.history.new_file import replacing

FIGURES = (".png", ".pdf", ".svg")
DPI = 200


def check_suffix(path: Path, known: Sequence[str]) -> str:
    """The ending of a file in lower case; ``ValueError`` lists the known ones."""
    suffix = path.suffix.lower()
    if suffix not in known:
        wrong = f"the ending {path.suffix}" if suffix else "no ending"
        raise ValueError(f"{path} has {wrong}: use one of {', '.join(known)}")
    return suffix


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the ending of ``path`` says."""
    suffix = check_suffix(path, FIGURES)
    with replacing(path) as partial:
        color = figure.get_facecolor()
        figure.savefig(partial, format=suffix.removeprefix("."), dpi=DPI, facecolor=color)
