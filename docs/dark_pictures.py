"""Pictures on a dark ground for dark pages, a second one of each that a script draws.

``run_gallery`` runs this as a program, with the paths of a script and of its pictures' folder.
"""

import pickle
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from gradlens.instruments.style import PAPER
from gradlens.plotting.recolouring import darken

DARK = "-dark"
"""What the names of dark pictures end in."""


def dark_name(path: Path) -> Path:
    """The dark picture beside another one."""
    return path.with_stem(path.stem + DARK)


def run(script: str, folder: Path) -> None:
    """Run a script's ``main``; each PNG of a white figure that it saves has a dark one, too."""
    save = Figure.savefig

    def save_both(figure: Figure, path: Any, **options: Any) -> None:
        save(figure, path, **options)
        # What gradlens itself writes is renamed afterwards; it draws dark figures on request.
        is_temporary = isinstance(path, Path) and path.name.startswith(".")
        is_png = isinstance(path, Path) and path.suffix == ".png"
        if is_png and not is_temporary and is_white(figure):
            # The script may go on drawing on its figure.
            copy = pickle.loads(pickle.dumps(figure))
            darken(copy)
            save(copy, dark_name(path), **options | {"facecolor": copy.get_facecolor()})

    with mock.patch.object(Figure, "savefig", save_both):
        runpy.run_path(script)["main"](folder)


def is_white(figure: Figure) -> bool:
    """Whether a figure's ground is that of paper."""
    return to_hex(figure.get_facecolor()) == PAPER


if __name__ == "__main__":
    # Some builds of torchvision don't match the CPU build of torch.
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    run(sys.argv[1], Path(sys.argv[2]))
