"""The documentation's pictures on a dark ground."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from gradlens.instruments.dark import DARK
from gradlens.instruments.style import PAPER

PROGRAM = Path(__file__).parents[1] / "docs" / "dark_pictures.py"
SCRIPT = """
from matplotlib.figure import Figure

def main(folder):
    figure = Figure(facecolor={color!r})
    figure.subplots().plot([1, 2])
    figure.savefig(folder / "one.png")
    figure.savefig(folder / "one.pdf")
    figure.savefig(folder / "again.png")
"""


def corner(picture: Path) -> str:
    return to_hex(tuple(imread(picture)[0, 0, :3]))


@pytest.mark.skipif(not PROGRAM.exists(), reason="the documentation isn't there")
@pytest.mark.parametrize("color", [PAPER, "#123456"])
@pytest.mark.slow
def test_a_white_picture_has_a_dark_one_beside_it(color: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "pictures"
    script.write_text(SCRIPT.format(color=color))
    folder.mkdir()
    subprocess.run([sys.executable, "-W", "error", PROGRAM, script, folder], check=True)
    assert corner(folder / "one.png") == corner(folder / "again.png") == color
    found = {path.name for path in folder.iterdir()}
    if color == PAPER:
        assert corner(folder / "one-dark.png") == corner(folder / "again-dark.png") == DARK[PAPER]
        found -= {"one-dark.png", "again-dark.png"}
    assert found == {"one.png", "one.pdf", "again.png"}
