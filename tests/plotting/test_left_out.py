"""What can't be drawn is left out with a warning, and texts are shown as they are."""

from __future__ import annotations

import re
from io import BytesIO
from typing import ClassVar

import pytest
from matplotlib.figure import Figure

from gradlens import CockpitPlotter, History, View
from gradlens.history.records import LeftOutWarning, Note, Source
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Content
from gradlens.plotting.screen import MOST, Screen


class Broken(Instrument):
    kinds: ClassVar[tuple[str, ...]] = ("Broken",)
    title: ClassVar[str] = "Broken"

    def content(self, history: History) -> Content:
        raise ZeroDivisionError("no luck")


def test_a_panel_that_cannot_be_drawn() -> None:
    history = History({name: Source((name,), View(name)) for name in ("Broken", "Loss")})
    history.append(0, {"Broken": 1.0, "Loss": 2.0})
    figure = Figure()
    screen = Screen("A run", instruments=(Broken(),))
    text = re.escape("Broken can't be drawn (ZeroDivisionError: no luck)")
    with pytest.warns(LeftOutWarning, match=text):
        screen.draw(history, figure)
    assert len(figure.axes) == 2
    assert "Broken can't be drawn" in [text.get_text() for ax in figure.axes for text in ax.texts]


def test_more_series_than_a_figure_can_show() -> None:
    history = History()
    history.append(0, {f"s{number}": float(number) for number in range(MOST + 3)})
    names = [f"s{number}" for number in range(MOST, MOST + 3)]
    with pytest.warns(LeftOutWarning, match=f"those of {', '.join(names)} are left out"):
        panels = Screen("").panels(history)
    assert len(panels) == MOST


def test_dollar_signs_are_no_formulas() -> None:
    view = View("$\\frac{$", label="$l^$")
    history = History({"$x^": Source(("X",), view)}, {"$w^$": (2,)})
    for step in range(4):
        history.append(step, {"$x^": 1000.0**step, "$a^$": {"$p^$": 1.0, "$q_$": 2.0}})
    history.notes.append(Note(1, "it costs $5, and $x^"))
    figure = CockpitPlotter().plot(history, show_plot=False, plot_title="$t^$")
    image = BytesIO()
    figure.savefig(image, format="svg")
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", image.getvalue().decode())
    assert {"$\\frac{$", "$t^$", "$p^$"} <= {*shown}
