"""Pictures on a dark ground for dark pages, a second one of each that a script or a cell draws.

``run_gallery`` runs this as a program, with the paths of a script and of its pictures' folder;
``cells`` runs the cells of a page in ``both_grounds``.
"""

import gc
import pickle
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from gradlens.instruments.style import PAPER
from gradlens.plotting.dark import darken

DARK = "-dark"
"""What the names of dark pictures end in."""


def dark_name(path: Path) -> Path:
    """The dark picture beside another one."""
    return path.with_stem(path.stem + DARK)


@contextmanager
def both_grounds() -> Iterator[dict[bytes, bytes]]:
    """Each PNG of a white figure that is drawn has a dark one, too.

    A file has it beside it. Pictures that are displayed have no file: the dictionary has the dark
    one of each.
    """
    displayed: dict[bytes, bytes] = {}
    draw = FigureCanvasBase.print_figure

    def draw_both(canvas: FigureCanvasBase, target: Any, *given: Any, **options: Any) -> Any:
        done = draw(canvas, target, *given, **options)
        if not is_white(canvas.figure):
            return done
        if isinstance(target, BytesIO) and options.get("format") == "png":
            draw_dark(canvas.figure, dark := BytesIO(), options)
            displayed[target.getvalue()] = dark.getvalue()
        elif isinstance(target, (str, Path)) and Path(target).suffix == ".png":
            draw_dark(canvas.figure, dark_name(renamed(Path(target))), options)
        return done

    with mock.patch.object(FigureCanvasBase, "print_figure", draw_both):
        yield displayed


def is_white(figure: Figure) -> bool:
    """Whether a figure's ground is that of paper."""
    return to_hex(figure.get_facecolor()) == PAPER


def draw_dark(figure: Figure, target: Any, options: dict[str, Any]) -> None:
    """Draw a figure on a dark ground; the script may go on drawing on it."""
    # A copy with a manager would be one more figure of pyplot. While garbage is collected, dead
    # parents leave the dictionaries of transforms that are being copied.
    gc.disable()
    with mock.patch.object(figure.canvas, "manager", None):
        copy = pickle.loads(pickle.dumps(figure))
    gc.enable()
    darken(copy)
    copy.savefig(target, **options | {"facecolor": copy.get_facecolor(), "edgecolor": "auto"})


def renamed(path: Path) -> Path:
    """The name that a file gets: gradlens writes ``.name.number.png`` at first."""
    return path.with_stem(path.stem[1:].rpartition(".")[0]) if path.name[0] == "." else path


def run(script: str, folder: Path) -> None:
    """Run a script's ``main``."""
    with both_grounds():
        runpy.run_path(script)["main"](folder)


if __name__ == "__main__":
    # Some builds of torchvision don't match the CPU build of torch.
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    run(sys.argv[1], Path(sys.argv[2]))
