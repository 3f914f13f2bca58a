"""Instruments and quantities of the user's own: what draws them, and where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradlens
from gradlens import quantities
from gradlens.cli.panels_text import panels_text
from gradlens.history.history import History
from gradlens.history.records import LeftOutWarning, Source
from gradlens.history.view import View
from gradlens.instruments import (
    BUILT_IN,
    Curve,
    Drawn,
    Grid,
    Instrument,
    Lines,
    Ruler,
    Shape,
    Shapes,
    line,
)
from gradlens.plotting.plotter import CockpitPlotter
from gradlens.plotting.screen import main_parts

PAGE = Path(__file__).parents[2] / "docs" / "own-instrument.rst"


class MyNorm(quantities.GradNorm):
    """A quantity derived from one that has an instrument."""


class MyNormInstrument(Instrument):
    """An instrument for that quantity alone."""

    kinds = ("MyNorm",)
    title = "My norm"

    def content(self, history: History) -> Lines:
        return Lines((Curve(self.names[0], line(history[self.names[0]].column("w"))),))


class MyMapInstrument(MyNormInstrument):
    """The same on the secondary screen."""

    title = "My map"
    secondary = True


def recorded(*sources: tuple[str, ...]) -> History:
    """A history with a series of norms for each hierarchy of classes, named after the first."""
    history = History({kinds[0]: Source(kinds, View("Norm")) for kinds in sources}, {"w": (2,)})
    for step in range(3):
        history.append(step, {kinds[0]: {"w": 1.0 + step} for kinds in sources})
    return history


def drawn(history: History, instruments: tuple[Instrument, ...]) -> list[tuple[str, ...]]:
    """Names of instrument and series on each panel of the main screen."""
    return [(type(one).__name__, *one.names) for one in main_parts(history, instruments)]


def blocks(directive: str) -> list[str]:
    """The indented blocks under a directive of the page."""
    found = re.findall(rf"^\.\. {directive}::\n\n((?:   .*\n|\n)+)", PAGE.read_text("utf-8"), re.M)
    return [re.sub(r"^   ", "", block, flags=re.M).strip() for block in found]


def test_page_works_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    codes, outputs = blocks("testcode"), blocks("testoutput")
    assert len(codes) == len(outputs) == 2
    names: dict[str, object] = {}
    for code, output in zip(codes, outputs, strict=True):
        exec(code, names)
        assert capsys.readouterr().out.strip() == output


def test_a_derived_quantity_is_drawn_as_its_base_by_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in another process, which doesn't know the class; drawing imports no quantities."""
    model = torch.nn.Linear(3, 2)
    run = tmp_path / "run.jsonl"
    cockpit = gradlens.Cockpit(model, [MyNorm()], run=run)
    with cockpit(0):
        model(torch.ones(4, 3)).sum(1).mean().backward()
    cockpit.close()
    assert History.load(run).sources["MyNorm"].kinds == ("MyNorm", "GradNorm")
    CockpitPlotter().plot(run, show_plot=False, debug=True)
    assert caplog.messages == ["primary: Gradient norm [step size] MyNorm"]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("MyNorm", "GradNorm"), "MyNormInstrument"),
        (("Mine", "MyNorm", "GradNorm"), "MyNormInstrument"),
        (("Mine", "GradNorm"), "GradNormInstrument"),
        (("GradNorm",), "GradNormInstrument"),
        (("Mine",), "GenericInstrument"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_the_most_specific_instrument_draws(
    kinds: tuple[str, ...], expected: str, first: bool
) -> None:
    own = MyNormInstrument()
    instruments = (own, *BUILT_IN) if first else (*BUILT_IN, own)
    assert drawn(recorded(kinds), instruments) == [(expected, kinds[0])]


def test_instruments_that_cannot_draw_a_series_do_not_take_it() -> None:
    class Picky(MyNormInstrument):
        part = "layers"

    history = recorded(("MyNorm", "GradNorm"))
    assert drawn(history, (*BUILT_IN, Picky())) == [("GradNormInstrument", "MyNorm")]


def test_plotter_draws_with_the_given_instruments_alone() -> None:
    history = recorded(("MyNorm", "GradNorm"))
    plotter = CockpitPlotter(secondary_screen=True, instruments=[MyMapInstrument()])
    figure = plotter.plot(history, show_plot=False)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["Norm"]
    assert [ax.get_title(loc="left") for ax in plotter.secondary_figure.axes] == ["My map"]


def test_pages_draw_with_the_given_instruments() -> None:
    pytest.importorskip("bokeh")
    from gradlens.report.content import cards

    history = recorded(("MyNorm", "GradNorm"))
    found = cards({"run": history}, (*BUILT_IN, MyNormInstrument()))
    (shown,) = (one.panel.content for one in found if one.panel.title == "My norm")
    assert isinstance(shown, Lines)
    assert [curve.name for curve in shown.curves] == ["MyNorm"]


class MyShapes(MyNormInstrument):
    """Shapes of the user's own."""

    def content(self, history: History) -> Shapes:
        x = np.arange(3.0)
        kinds: tuple[Any, ...] = ("line", "area", "points", "arrow")
        shapes = tuple(Shape(kind, x, x, kind=kind) for kind in kinds)
        return Shapes(shapes, Ruler("x", (0, 3)), Ruler("y", (0, 3)))


def test_shapes_are_drawn_in_figures_and_on_pages() -> None:
    pytest.importorskip("bokeh")
    from bokeh.document import Document

    from gradlens.report.page import Live, page

    history = recorded(("MyNorm", "GradNorm"))
    drawing = MyShapes().plot(history)
    assert {*drawing.artists} == {"line", "area", "points", "arrow"}
    document = Live(page({"run": history}, "", (MyShapes(),))).document(Document())
    assert len([*document.select({"name": "shape"})]) == 5  # an arrow has a line and a head
    printed = panels_text(MyShapes().panels(history), "run", 80)
    assert f"  {MyShapes().panels(history)[0].title}" in printed
    assert "▁▅█" in printed


class MyDrawing(MyNormInstrument):
    """What only matplotlib draws."""

    def content(self, history: History) -> Drawn:
        return Drawn(lambda ax, axis: {"mine": ax.text(0, 0, "mine")})


class MyGrid(MyNormInstrument):
    """Small panels of the user's own."""

    def content(self, history: History) -> Grid:
        lines = Lines((Curve("w", line(history[self.names[0]].column("w"))),))
        return Grid({"one": lines, "two": lines}, "small panels")


class MyFailure(MyNormInstrument):
    """What fails while it is drawn."""

    def content(self, history: History) -> Drawn:
        return Drawn(lambda ax, axis: {"mine": ax.nothing})  # type: ignore[attr-defined]


def test_drawings_and_grids_are_pictures_on_pages() -> None:
    pytest.importorskip("bokeh")
    from gradlens.report.page import Live, page

    history = recorded(("MyNorm", "GradNorm"))
    for one in (MyDrawing(), MyGrid()):
        live = Live(page({"run": history}, "", (one,)))
        (picture,) = live._status.data["pictures"][0].values()
        assert picture.startswith("data:image/png;base64,")
    with pytest.warns(LeftOutWarning, match="MyNorm can't be drawn"):
        shown = page({"run": history}, "", (MyFailure(),))
    assert Live(shown)._status.data["pictures"] == [{}]


def test_a_derived_quantity_is_compared_as_its_base() -> None:
    (number,) = recorded(("MyNorm", "GradNorm")).scalars()
    assert (number.name, number.line.values.tolist()) == ("MyNorm", [1, 2, 3])
