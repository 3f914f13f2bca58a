"""Figures on a dark ground."""

from __future__ import annotations

from typing import ClassVar, get_args

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.instruments import Instrument
from gradlens.instruments.instrument import step_axis
from gradlens.instruments.panel import Artists, Drawn
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.style import (
    ALARM,
    CATEGORICAL,
    INK,
    MUTED,
    PAPER,
    Color,
    sequence_colors,
    tint,
)
from gradlens.plotting.dark import DARK, dark
from gradlens.plotting.layout import Look
from gradlens.plotting.plotter import CockpitPlotter
from gradlens.plotting.rendering import Words, draw
from gradlens.plotting.screen import Screen
from tests.instruments.test_instruments import realistic
from tests.plotting.test_plotter import drawn

RUN = realistic(20)
GROUND = DARK[PAPER]
TEXT, MARK = 4.5, 3.0
"""Least contrasts of text (1.4.3) and of graphics (1.4.11) in the Web Content Accessibility
Guidelines 2.2."""


def luminance(color: Color) -> float:
    """The relative luminance that those guidelines define."""
    r, g, b = ((c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in to_rgb(color))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: Color, other: Color) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


NAMED = [(color, TEXT) for color in (INK, MUTED, ALARM, *CATEGORICAL, "black")]


@pytest.mark.parametrize(("color", "least"), [*NAMED, *((c, MARK) for c in sequence_colors(12))])
def test_named_colours_can_be_read_and_lines_seen(color: Color, least: float) -> None:
    assert contrast(dark(color), GROUND) >= least


@pytest.mark.parametrize("color", CATEGORICAL)
def test_what_is_pale_on_white_is_like_the_ground(color: str) -> None:
    contrasts = [contrast(dark(tint(color, share)), GROUND) for share in (0.1, 0.2, 0.35, 0.6)]
    assert contrasts == sorted(contrasts)
    assert contrasts[0] < 1.5
    assert dark("white") == to_rgb(GROUND)


def texts(figure: Figure) -> list[Text]:
    figure.draw_without_rendering()  # makes the labels of ticks
    found = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    return [text for text in found if isinstance(text, Text)]


@pytest.mark.slow
def test_every_text_of_a_figure_can_be_read() -> None:
    plotter = CockpitPlotter(secondary_screen=True)
    plotter.plot(RUN, show_plot=False, style="dark")
    for figure in (plotter.figure, *plotter.secondary_figures):
        assert figure.get_facecolor()[:3] == to_rgb(GROUND)
        found = {}
        for text in texts(figure):
            box = text.get_bbox_patch()
            ground = box.get_facecolor()[:3] if box else GROUND
            found[text.get_text()] = contrast(text.get_color(), ground)
        assert found
        assert [text for text, ratio in found.items() if ratio < TEXT] == []


def test_marks_of_findings_can_be_read() -> None:
    history = realistic(20, ("Loss",))
    found = [
        Finding("dead_relus", "All units are dead", 5, "very likely", alarm)
        for alarm in (True, False)
    ]
    figure = Figure()
    panels = Screen("").panels(history)
    draw(figure, panels, Words(""), step_axis(history), findings=found, look="dark")
    badges = [text for text in texts(figure) if text.get_bbox_patch()]
    assert {badge.get_text() for badge in badges} == {"1", "2"}
    for badge in badges:
        box = badge.get_bbox_patch()
        assert contrast(badge.get_color(), box.get_facecolor()[:3]) >= TEXT


class Plain(Instrument):
    """An instrument of a user, in matplotlib's own colours."""

    kinds: ClassVar[tuple[str, ...]] = ("Loss",)

    def content(self, history: History) -> Drawn:
        return Drawn(self._draw)

    def _draw(self, ax: Axes, axis: StepAxis) -> Artists:
        ax.plot([0, 1], [0, 1], "k-o", markerfacecolor="w")
        ax.add_patch(Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="black", alpha=0.5))
        return {"text": ax.text(0, 0, "mine")}


def test_an_instrument_needs_to_know_nothing_of_it() -> None:
    plotter = CockpitPlotter(instruments=[Plain()])
    figure = plotter.plot(RUN, show_plot=False, panels=["Loss"], style="dark")
    (ax,) = figure.axes
    (mine,) = (text for text in ax.texts if text.get_text() == "mine")
    line, box = ax.lines[0], ax.patches[0]
    assert mine.get_color()[:3] == line.get_color()[:3] == to_rgb(DARK[INK])  # type: ignore[index]
    assert line.get_markerfacecolor()[:3] == box.get_facecolor()[:3] == to_rgb(GROUND)
    assert box.get_alpha() == 0.5


def test_labels_that_are_made_later_have_their_colour() -> None:
    figure = drawn(RUN, panels=["Loss"], style="dark")
    (ax,) = figure.axes
    ax.set_ylim(1e-9, 1e9)
    figure.draw_without_rendering()
    assert {text.get_color() for text in ax.get_yticklabels()} == {(*to_rgb(DARK[MUTED]), 1.0)}


def test_nothing_to_draw_is_said_on_a_dark_ground() -> None:
    figure = drawn(History(), style="dark")
    assert figure.get_facecolor()[:3] == to_rgb(GROUND)


def test_a_figure_can_become_light_again() -> None:
    figure = Figure()
    panels = Screen("", names=("Loss",)).panels(RUN)
    for look in get_args(Look):
        draw(figure, panels, Words(""), step_axis(RUN), look=look)
        assert figure.get_facecolor()[:3] == to_rgb(GROUND if look == "dark" else PAPER)
