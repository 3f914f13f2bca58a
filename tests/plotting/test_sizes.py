"""Figures of chosen panels and sizes, for papers, in other sizes of type, and as vector files."""

from __future__ import annotations

import math
import re
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.records import Note
from gradlens.instruments.style import shorten, shorten_apart, size_in_points, text_width, wrapped
from gradlens.plotting.plotter import CockpitPlotter
from gradlens.plotting.screen import Screen
from tests.instruments.test_instruments import realistic
from tests.plotting.test_plotter import clashes, drawn, titles, words

COLUMN = 3.3
"""Inches of a column of a paper."""

RUN = realistic(60)
MAIN = [panel.title for panel in Screen("").panels(RUN)]
TWO_PARTS = ("Gradient tests", "Local step size α", "Signal along directions")
EVERY = list(dict.fromkeys([*MAIN, *(p.title for p in Screen("", layers=True).panels(RUN))]))


@pytest.mark.parametrize("title", EVERY)
def test_a_panel_in_a_column_has_a_label_and_nothing_is_cut(
    title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn(RUN, panels=[title], size=COLUMN, style="paper")
    assert figure.get_size_inches()[0] == pytest.approx(COLUMN)
    assert clashes(figure, monkeypatch, cut=1) == []
    (shown,) = titles(figure)[:1]
    assert shown.replace("\n", " ") == title
    assert 0.1 < figure.get_tightbbox().x0 < 0.2  # inches
    axes = [ax for ax in figure.axes for ax in (ax, *ax.child_axes) if ax.axison]
    if title in MAIN and title != "Gradient tests":
        assert any(ax.get_ylabel() for ax in axes)


@pytest.mark.parametrize("width", [1.8, 2.4, 3.3, 4.5])
@pytest.mark.parametrize("title", TWO_PARTS)
def test_a_series_has_room_beside_a_picture_or_the_whole_panel(title: str, width: float) -> None:
    figure = drawn(RUN, panels=[title], size=width, style="paper")
    (ax,) = figure.axes
    parts = [part for part in ax.child_axes if isinstance(part, Axes)] or [ax]
    assert size_in_points(parts[-1])[0] >= 60
    assert len(parts) == (2 if width > 3 else 1)


def test_a_paper_has_panels_alone() -> None:
    history = realistic(20, ("Loss",))
    history.notes.append(Note(3, "a note"))
    paper, screen = (drawn(history, style=style) for style in ("paper", "screen"))
    assert {"PERFORMANCE", "Note at step 3: a note"} <= words(screen)
    assert not {"PERFORMANCE", "Note at step 3: a note", "Cockpit"} & words(paper)


def test_panels_are_those_asked_for_in_their_order() -> None:
    figure = drawn(RUN, panels=["Update size", "Loss", "GradNorm", "Gradient norm by parameter"])
    wanted = ["Update size", "Loss", "Gradient norm", "Gradient norm by parameter"]
    assert sorted(titles(figure)) == sorted(wanted)
    assert titles(figure)[0] == "Update size"


def test_a_misspelt_panel_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="no panel 'Gradient nrom': did you mean Gradient norm"):
        drawn(RUN, panels=["Gradient nrom"])
    with pytest.raises(ValueError, match="no style 'poster'"):
        drawn(RUN, style="poster")
    with pytest.raises(TypeError, match="pass a list"):
        drawn(RUN, panels="Loss")


def test_size_is_that_of_the_figure() -> None:
    assert tuple(drawn(RUN, panels=["Loss"], size=(4, 3)).get_size_inches()) == (4, 3)
    assert drawn(RUN, panels=["Loss"], size=7).get_size_inches()[0] == 7


def test_a_size_without_room_for_the_panels_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"size=\(9, 5\): \d+ panels .* at least .* inches high"):
        drawn(RUN, size=(9, 5))
    for size in (0, -3, math.nan, 1):
        with pytest.raises(ValueError, match=r"at least 1\.5 inches wide"):
            drawn(RUN, panels=["Loss"], size=size)


@pytest.mark.parametrize("size", [6.0, 10.0, 12.0])
@pytest.mark.slow
def test_font_size_has_an_effect_and_nothing_overlaps(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with matplotlib.rc_context({"font.size": size}):
        figure = drawn(realistic(60, ("Loss", "GradNorm", "NormTest", "GradHist1d", "HessTrace")))
        assert clashes(figure, monkeypatch, cut=1) == []
        (title,) = (ax.title for ax in [figure.axes[0]])
        assert figure.axes[0].get_title(loc="left")
        left = figure.axes[0]._left_title  # type: ignore[attr-defined]
        assert left.get_fontsize() == pytest.approx(0.833 * size)
        assert title is not left


@pytest.mark.parametrize("ending", ["pdf", "svg"])
@pytest.mark.parametrize("way", ["savefig", "save_plot"])
def test_texts_of_vector_files_are_texts(ending: str, way: str, tmp_path: Path) -> None:
    path = tmp_path / f"cockpit__primary.{ending}"
    options = {"save_plot": True, "savedir": tmp_path, "savefig_kwargs": {"format": ending}}
    figure = drawn(realistic(5, ("Loss",)), **(options if way == "save_plot" else {}))
    if way == "savefig":
        figure.savefig(path)
    content = path.read_bytes()
    if ending == "svg":
        assert re.search(rb"<text[^>]*>Loss</text>", content)
    else:
        assert b"/Type3" not in content


def test_titles_become_smaller_before_they_are_cut() -> None:
    for width in (1.9, 2.2, 2.6, 3.3):
        figure = drawn(RUN, panels=["Largest Hessian eigenvalue"], size=(width, 2.2))
        assert titles(figure)[0].replace("\n", " ") == "Largest Hessian eigenvalue"


TEXT = "per-sample gradients cover half of the trainable parameters, and quantities describe these"


@pytest.mark.parametrize("width", [60.0, 150.0, 1000.0])
def test_texts_are_wrapped_between_words(width: float) -> None:
    lines = wrapped(TEXT, width, 7, 99)
    assert " ".join(lines) == TEXT
    assert all(text_width(line, 7) <= width for line in lines)


def test_a_text_that_is_too_long_ends_between_words() -> None:
    lines = wrapped(TEXT, 150, 7, 2)
    assert len(lines) == 2
    assert lines[-1].endswith(" …")
    assert TEXT.startswith(" ".join(lines).removesuffix(" …"))


LONG = [
    f"encoder.a_long_name_of_a_module_{n}.another_long_name_of_a_module.weight" for n in range(20)
]


@pytest.mark.parametrize("width", [50.0, 90.0, 1000.0])
@pytest.mark.parametrize("names", [LONG, LONG[9:11], ["a" * 40 + one + "b" * 40 for one in "xyz"]])
def test_short_names_differ_where_whole_ones_do(names: list[str], width: float) -> None:
    shown = shorten_apart(names, width, 7)
    assert len({*shown}) == len(names)
    assert all(text_width(text, 7) <= width for text in shown)
    assert width < 1000 or shown == names


def test_names_that_differ_at_their_ends_keep_both_ends() -> None:
    names = ["encoder.0.attention.weight", "decoder.0.attention.bias"]
    assert shorten_apart(names, 70, 7) == [shorten(name, 70, 7) for name in names]


def test_no_number_is_on_the_secondary_screen_twice() -> None:
    kinds = ("OutputNorm", "ParameterNorm", "UpdateGeometry", "GradNorm", "InputCovariance")
    history: History = realistic(12, kinds)
    plotter = CockpitPlotter(secondary_screen=True)
    plotter.plot(history, show_plot=False)
    shown = [title for figure in plotter.secondary_figures for title in titles(figure)]
    assert len(shown) == len({*shown})
    assert [title for title in shown if title.startswith("Output norm")] == ["Output norm by layer"]
