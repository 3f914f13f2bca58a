"""The documentation's pictures on a dark ground."""

from __future__ import annotations

import runpy
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from gradlens.instruments.style import PAPER
from gradlens.plotting.dark import DARK

PROGRAM = Path(__file__).parents[1] / "docs" / "dark_pictures.py"
SCRIPT = """
from matplotlib.figure import Figure

from gradlens.plotting.output import write_figure

def drawn(color):
    figure = Figure(facecolor=color)
    figure.subplots().plot([1, 2])
    return figure

def main(folder):
    figure = drawn({paper!r})
    figure.savefig(folder / "one.png")
    figure.savefig(folder / "one.pdf")
    figure.savefig(folder / "again.png")
    write_figure(figure, folder / "whole.png")
    drawn("#123456").savefig(folder / "own.png")
"""


def corner(picture: Path | BytesIO) -> str:
    return to_hex(tuple(imread(picture)[0, 0, :3]))


pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="the documentation isn't there")


def test_a_picture_that_is_displayed_has_a_dark_one() -> None:
    figure, shown = Figure(facecolor=PAPER), BytesIO()
    with runpy.run_path(str(PROGRAM))["both_grounds"]() as dark:
        # As notebooks do.
        figure.canvas.print_figure(shown, format="png", facecolor=PAPER, bbox_inches="tight")
    assert corner(BytesIO(shown.getvalue())) == PAPER
    assert [corner(BytesIO(picture)) for picture in dark.values()] == [DARK[PAPER]]
    assert [*dark] == [shown.getvalue()]


@pytest.mark.slow
def test_a_white_picture_has_a_dark_one_beside_it(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "pictures"
    script.write_text(SCRIPT.format(paper=PAPER))
    folder.mkdir()
    subprocess.run([sys.executable, "-W", "error", PROGRAM, script, folder], check=True)
    assert corner(folder / "one.png") == corner(folder / "again.png") == PAPER
    assert corner(folder / "own.png") == "#123456"
    dark = {f"{name}-dark.png" for name in ("one", "again", "whole")}
    assert {corner(folder / name) for name in dark} == {DARK[PAPER]}
    found = {path.name for path in folder.iterdir()}
    assert found == {"one.png", "one.pdf", "again.png", "whole.png", "own.png", *dark}
