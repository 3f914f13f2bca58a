"""Files that are whole, or not there at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from gradlens.history.run_file import replacing
from gradlens.plotting.output import FIGURES, write_figure

BEGINNINGS = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as partial:
        assert partial.parent == path.parent
        assert partial.suffix == ".txt"
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error):
        with replacing(path) as partial:
            partial.write_text("half")
            raise error
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("suffix", FIGURES)
@pytest.mark.parametrize("upper", [False, True])
def test_the_ending_tells_the_format(tmp_path: Path, suffix: str, upper: bool) -> None:
    path = tmp_path / "new" / f"a{suffix.upper() if upper else suffix}"
    write_figure(Figure(), path)
    assert path.read_bytes().startswith(BEGINNINGS[suffix])
