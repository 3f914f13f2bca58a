"""What figures of landscapes show, and what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.text import Text

from gradlens.history.undefined import Undefined
from gradlens.landscape import LossLine, LossPlane
from gradlens.landscape.figures import SHADES, levels, loss_norm

AT = np.linspace(-1, 1, 9)
LINE = LossLine(AT, 1 + AT**2, "a $direction$ (1 = its norm)", 1.0, 0.0, 2.0)
PLANE = LossPlane(
    AT, AT[2:], 0.1 + AT[:, None] ** 2 + 9 * AT[2:] ** 2, ("first", "second"), 0.1,
    np.empty((0, 2)), np.nan,
)  # fmt: skip


def texts(figure: Figure) -> str:
    return "\n".join(found.get_text() for found in figure.findobj(Text))


def test_a_line_has_its_losses_and_the_parabola() -> None:
    drawn = LINE.plot()
    np.testing.assert_array_equal(drawn.artists["losses"].get_ydata(), LINE.losses)
    np.testing.assert_array_equal(drawn.artists["parabola"].get_ydata(), LINE.parabola)
    assert drawn.artists["origin"].get_xydata().tolist() == [[0.0, 1.0]]
    shown = texts(drawn.figure)
    for text in ("a $direction$ (1 = its norm)", "mean loss", "1 at 0", "slope 0, curvature 2"):
        assert text in shown
    assert drawn.ax.get_yscale() == "linear"
    steep = replace(LINE, losses=np.exp(5 * AT**2))
    assert steep.plot().ax.get_yscale() == "log"


def test_losses_that_are_not_finite_are_marked() -> None:
    losses = LINE.losses.copy()
    losses[0], losses[-1] = np.nan, np.inf
    drawn = replace(LINE, losses=losses).plot()
    assert drawn.artists["missing"].get_xdata().tolist() == [-1.0]
    assert drawn.artists["infinite"].get_xdata().tolist() == [1.0]
    assert {"NaN", "∞"} <= {*texts(drawn.figure).split("\n")}
    plane = PLANE.losses.copy()
    plane[0, 1], plane[2, 3] = np.nan, np.inf
    drawn = replace(PLANE, losses=plane).plot()
    assert drawn.artists["undefined"].get_xydata().tolist() == [[AT[0], AT[3]], [AT[2], AT[5]]]
    assert "hatched: no finite number" in texts(drawn.figure)
    assert "hatches" not in PLANE.plot().artists


def test_without_a_finite_loss_there_is_a_message() -> None:
    for value, words in ((np.nan, "never a finite number"), (np.inf, "infinite")):
        for one in (LINE, PLANE):
            drawn = replace(one, losses=np.full_like(one.losses, value)).plot()
            assert words in texts(drawn.figure)


def test_a_parabola_that_cannot_be_had_is_left_out() -> None:
    why = Undefined("no second derivative")
    drawn = replace(LINE, curvature=why).plot()
    assert "parabola" not in drawn.artists
    assert "curvature" not in texts(drawn.figure)


def test_a_plane_has_the_path_and_its_share() -> None:
    path = np.array([[0.5, 0.5], [0.0, 0.0]])
    drawn = replace(PLANE, path=path, in_plane=0.913).plot()
    assert drawn.artists["path"].get_xydata().tolist() == path.tolist()
    assert "path: 91 % in the plane" in texts(drawn.figure)
    inner = drawn.artists["origin"].axes
    assert (inner.get_xlim(), inner.get_ylim()) == ((-1.0, 1.0), (-0.5, 1.0))
    assert (inner.get_xlabel(), inner.get_ylabel()) == ("first", "second")
    assert "path" not in PLANE.plot().artists


def test_the_map_has_the_losses_at_their_places() -> None:
    """The minimum of the loss is the darkest place."""
    losses = 0.1 + (AT[:, None] - 0.5) ** 2 + 9 * (AT[2:] + 0.25) ** 2
    drawn = replace(PLANE, losses=losses).plot()
    lowest = drawn.artists["map"].get_paths()[0].vertices
    np.testing.assert_allclose(lowest.mean(0), [0.5, -0.25], atol=0.1)


@pytest.mark.parametrize(
    ("losses", "kind"),
    [
        ([1.0, 2.0], Normalize),
        ([0.1, 2.0], LogNorm),
        ([0.0, 1.0, 2.0], Normalize),
        ([-2.0, -1.0, np.nan], Normalize),
        ([-2.0, 1.0, 3.0, 1e4], SymLogNorm),
        ([3.0, 3.0], Normalize),
        ([1e-30, 1e30, np.inf], LogNorm),
    ],
)
def test_levels_cover_the_finite_losses(losses: list[float], kind: type[Normalize]) -> None:
    found = np.array(losses)
    norm = loss_norm(found)
    assert type(norm) is kind
    shades, lines = levels(norm)
    finite = found[np.isfinite(found)]
    assert len(shades) == SHADES + 1
    assert (np.diff(shades) > 0).all()
    assert shades[0] <= finite.min() <= finite.max() <= shades[-1]
    assert 1 <= len(lines) <= 12
    drawn = replace(PLANE, losses=np.resize(found, PLANE.losses.shape)).plot()
    drawn.figure.draw_without_rendering()
