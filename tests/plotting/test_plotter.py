"""The figure as a whole: what is on it, where it is, and where it goes."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from gradlens.history.history import History
from gradlens.history.records import LeftOutWarning, Note, Source
from gradlens.history.run_file import replacing
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.instruments import Content, Instrument, Panel
from gradlens.instruments.instrument import step_axis
from gradlens.plotting.layout import TALLEST, WIDEST, arrange, pages
from gradlens.plotting.output import FIGURES, write_figure
from gradlens.plotting.plotter import CockpitPlotter
from gradlens.plotting.rendering import draw
from gradlens.plotting.screen import MOST, Screen, words_of
from tests.instruments.test_instruments import LOGGED, VIEWS, realistic, recorded, same, twice


@dataclass
class Live:
    """Something that has a history, as a live cockpit does."""

    history: History


def drawn(history: History, **options: object) -> Figure:
    """The figure of the first screen."""
    return CockpitPlotter().plot(history, show_plot=False, **options)  # type: ignore[arg-type]


def main_panels(history: History) -> tuple[Panel, ...]:
    """The panels of the main screen."""
    return Screen("").panels(history)


def layer_panels(history: History) -> tuple[Panel, ...]:
    """The panels of the secondary screen."""
    return Screen("", layers=True).panels(history)


def titles(figure: Figure) -> list[str]:
    """Titles of the panels, in their order."""
    return [title for ax in figure.axes if (title := ax.get_title(loc="left"))]


def words(figure: Figure) -> set[str]:
    """All texts of a figure."""
    return {text.get_text() for text in figure.findobj(Text)}


def clashes(figure: Figure, monkeypatch: pytest.MonkeyPatch, cut: float = 0.0) -> list[object]:
    """Pairs of drawn texts that overlap by more than a thin edge, and texts that the figure cuts.

    Of a text, ``cut`` pixels may be outside.
    """
    seen: list[Text] = []
    draw = Text.draw

    def watched(text: Text, *args: object, **kwargs: object) -> None:
        seen.append(text)
        draw(text, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Text, "draw", watched)
    canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    monkeypatch.undo()
    shown = [text for text in dict.fromkeys(seen) if text.get_visible() and text.get_text().strip()]
    words = [text.get_text() for text in shown]
    boxes = np.array([text.get_window_extent(canvas.get_renderer()).extents for text in shown])
    low, high = boxes[:, :2], boxes[:, 2:]
    common = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    overlap = np.argwhere(np.triu((common > 1).all(-1), 1))
    outside = (np.minimum(low, figure.bbox.size - high) < -cut).any(-1)
    return [*((words[a], words[b]) for a, b in overlap), *itertools.compress(words, outside)]


def troubled() -> History:
    """A run in which many things went wrong."""
    history = same(realistic(60), lambda step, old: Undefined("too noisy") if step > 40 else old)
    history.notes.extend(Note(step, "a module is not covered, " * 20) for step in range(3))
    return history


LAYERED = (
    "OutputNorm", "OutputActivation", "ParameterNorm", "UpdateGeometry", "InputCovariance",
    "OutputGradientCovariance", "GradNorm", "UpdateSize", "Distance", "HessTrace", "GradHist1d",
    "GradCovariance",
)  # fmt: skip
MAPPED = ("GradNorm", "UpdateSize", "Distance", "HessTrace", "GradCovariance")
OVER_STEPS = ("Loss", "GradNorm", "NormTest", "Alpha", "HessTrace", "GradHist1d", "learning_rate")
"""Some of each kind of panel that has an axis of steps, which all have in common."""
LIKE_OTHERS = ("GroupGradients", "CriticalSharpness", "StepLedger")
TWICE = tuple(kind for kind in (*VIEWS, *LOGGED) if kind not in LIKE_OTHERS)
"""As many kinds as a figure has room for twice, without some whose panels are like others'."""
SCENES = {
    "standard": lambda: realistic(100),
    "long": lambda: realistic(1200, OVER_STEPS),
    "one panel": lambda: realistic(50, ("Loss",)),
    "two panels": lambda: realistic(50, ("Loss", "GradHist1d")),
    "one step": lambda: realistic(1),
    "many layers": lambda: realistic(30, layers=15),
    "maps of very many layers": lambda: realistic(3, MAPPED, layers=60),
    "very many layers": lambda: realistic(3, ("GradHist1d",), layers=60),
    "signed": lambda: recorded(
        "Mine", {n: (-10.0) ** (n % 7 - 3) for n in range(20)}, yscale="symlog"
    ),
    "two of a kind": lambda: twice(realistic(20, TWICE)),
    "quantities of layers": lambda: realistic(12, LAYERED[:5], layers=12),
    "far steps": lambda: realistic(40, OVER_STEPS, every=2_500_000),
    "undefined": lambda: same(realistic(20), lambda step, old: Undefined("no reason " * 20)),
    "troubled": troubled,
}
FEW_PANELS = ("one panel", "two panels", "signed")
"""Scenes that are drawn in a moment."""
OF_LAYERS = ("standard", "troubled", *(name for name in SCENES if "layers" in name))
"""Scenes of which the secondary screen is drawn, too."""


@pytest.mark.parametrize(
    ("screen", "log_step", "scene"),
    [
        pytest.param(*each, marks=() if each[2] in FEW_PANELS else pytest.mark.slow)
        for place, name in enumerate(SCENES)
        for each in [("primary", place % 2 == 1, name), ("secondary", place % 2 == 1, name)]
        if each[0] == "primary" or name in OF_LAYERS
    ],
)
def test_no_texts_overlap(
    scene: str, screen: str, log_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = SCENES[scene]()
    panels = main_panels(history) if screen == "primary" else layer_panels(history)
    if not panels:
        return
    figure = Figure()
    widest = math.inf if screen == "primary" else WIDEST
    axis = step_axis(history, log_step)
    draw(figure, panels, words_of(history, "A run"), axis, widest=widest)
    assert clashes(figure, monkeypatch) == []


def test_only_panels_with_data_take_up_space() -> None:
    assert titles(drawn(realistic(20, ("Loss", "MeanGSNR")))) == ["Loss", "Mean GSNR"]
    assert titles(drawn(realistic(20, ("Loss",)))) == ["Loss"]


@pytest.mark.slow
def test_groups_are_named_and_together() -> None:
    history = realistic(20)
    assert {view.group.upper() for view in VIEWS.values()} <= words(drawn(history))
    groups = [panel.group for panel in main_panels(history)]
    assert groups == [
        group for group, _ in itertools.groupby(groups) for _ in range(groups.count(group))
    ]


def test_notes_are_shown() -> None:
    history = realistic(10, ("Loss",))
    history.notes.append(Note(0, "bias is tied"))
    assert "Note at step 0: bias is tied" in words(drawn(history))


def test_a_quantity_of_the_user_by_parameter_has_a_line_panel_and_a_map() -> None:
    history = History(
        {"Mine": Source(("Mine",), View("Mine"))}, {"a.weight": (1,), "b.weight": (1,)}
    )
    for step in range(5):
        history.append(step, {"Mine": {"a.weight": 1.0 + step, "b.weight": 2.0}})
    plotter = CockpitPlotter(secondary_screen=True)
    assert titles(plotter.plot(history, show_plot=False)) == ["Mine"]
    assert titles(plotter.secondary_figure) == ["Mine by parameter"]


def test_epochs_are_said_in_words() -> None:
    history = realistic(20, ("Loss",))
    history.append(10, {"epoch_count": 3})
    figure = drawn(history)
    assert titles(figure) == ["Loss"]
    assert any("epoch 3" in text for text in words(figure))


def test_series_of_layers_move_to_the_second_screen() -> None:
    views = {"a": View("a", group="layers"), "b": View("b", group="noise")}
    history = History({name: Source((name,), view) for name, view in views.items()})
    history.append(0, {"a": 1.0, "b": 1.0})
    plotter = CockpitPlotter(secondary_screen=True)
    assert titles(plotter.plot(history, show_plot=False)) == ["b"]
    assert titles(plotter.secondary_figure) == ["a"]
    assert titles(drawn(history)) == ["b", "a"]


def test_second_screen_without_layers_is_a_warning() -> None:
    plotter = CockpitPlotter(secondary_screen=True)
    with pytest.warns(UserWarning, match="record GradNorm, GradHist1d"):
        plotter.plot(realistic(5, ("Loss",)), show_plot=False)
    assert plotter.secondary_figure is None


def test_discard_is_by_step() -> None:
    history = realistic(20, ("Loss",), every=10)
    figure = drawn(history, discard=100)
    assert any("last step 100" in text for text in words(figure))
    assert figure.axes[0].get_xlim()[1] < 110
    assert len(history["Loss"]) == 20


def test_sources_are_histories_their_owners_and_files(tmp_path: Path) -> None:
    history = realistic(20, ("Loss", "MeanGSNR"))
    path = tmp_path / "my-run.jsonl"
    history.write(path)
    expected = titles(drawn(history))
    for source in (Live(history), path, str(path)):
        assert titles(CockpitPlotter().plot(source, show_plot=False)) == expected
    assert "my-run" in words(CockpitPlotter().plot(path, show_plot=False))


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "no-run.txt").write_text("hello\n")
    with pytest.raises(ValueError, match="not a gradlens run"):
        CockpitPlotter().plot(tmp_path / "no-run.txt", show_plot=False)
    with pytest.raises(FileNotFoundError):
        CockpitPlotter().plot(tmp_path / "nowhere", show_plot=False)
    with pytest.raises(TypeError, match="a set is no run"):
        CockpitPlotter().plot(set(), show_plot=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (History(), "no quantity was tracked"),
        (realistic(0, ("Loss",)), "backward must run inside.* check .*the track_schedule of Loss"),
        (recorded("Mine", {0: "text"}), "none of the recorded series can be drawn: Mine"),
    ],
)
def test_a_figure_says_why_there_is_nothing_to_draw(history: History, message: str) -> None:
    figure = drawn(history)
    assert re.search(message, " ".join(" ".join(words(figure)).split()))
    assert not titles(figure)


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_saves(ending: str, tmp_path: Path) -> None:
    plotter = CockpitPlotter(secondary_screen=True)
    plotter.plot(
        realistic(5, ("Loss", "GradHist2d", "OutputNorm")),
        show_plot=False,
        save_plot=True,
        savedir=tmp_path / "plots",
        savename="run",
        savename_append="epoch__001",
        savefig_kwargs={"format": ending},
    )
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {f"run__{screen}__epoch__001.{ending}" for screen in ("primary", "secondary")}
    assert all(path.stat().st_size > 10_000 for path in (tmp_path / "plots").iterdir())


def test_saves_next_to_the_run(tmp_path: Path) -> None:
    realistic(5, ("Loss",)).write(tmp_path / "run.jsonl")
    CockpitPlotter().plot(tmp_path / "run.jsonl", show_plot=False, save_plot=True)
    assert (tmp_path / "cockpit__primary.png").exists()


def test_debug_lists_what_is_drawn_and_what_is_not(caplog: pytest.LogCaptureFixture) -> None:
    history = realistic(5, ("Loss",))
    history.append(0, {"words": "text"})
    drawn(history, debug=True)
    lines = [line for text in caplog.messages for line in text.splitlines()]
    assert lines == ["primary: Loss [performance] Loss", "not drawn: words"]


@pytest.mark.slow
def test_windows_are_drawn_again() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    shown: list[bool] = []
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context({"backend": "agg"}):
        patch.setattr(pyplot, "show", lambda block: shown.append(block))
        own = pyplot.figure()
        plotter = CockpitPlotter()
        first = plotter.plot(realistic(5, ("Loss",)))
        second = plotter.plot(realistic(9, ("Loss", "MeanGSNR")), block=True)
        assert first is second
        assert pyplot.gcf() is own
        assert titles(second) == ["Loss", "Mean GSNR"]
        pyplot.close(first)
        third = plotter.plot(realistic(5, ("Loss",)))
        assert third is not first
        pyplot.close("all")
    assert shown == [False, True, False]


def panels(count: int) -> list[Panel]:
    """Equal panels."""
    return main_panels(realistic(1, ("Loss",)))[:1] * count  # type: ignore[return-value]


@pytest.mark.parametrize("count", range(1, 26))
def test_every_panel_has_a_place_in_balanced_rows(count: int) -> None:
    rows = [len(row) for row in arrange(panels(count))]
    assert sum(rows) == count
    assert max(rows) - min(rows) <= 1
    known = {1: [1], 2: [2], 4: [2, 2], 6: [3, 3], 12: [4, 4, 4]}
    assert rows == known.get(count, rows)


@pytest.mark.parametrize("layers", [3, 12, 50])
@pytest.mark.parametrize("count", [1, 3, pytest.param(len(LAYERED), marks=pytest.mark.slow)])
def test_pages_of_layers_are_not_too_large(count: int, layers: int) -> None:
    history = realistic(1, LAYERED[:count], layers=layers)
    panels = layer_panels(history)
    found = pages(panels)
    assert [panel for page in found for panel in page] == [*panels]
    rows = (row for page in found for row in arrange(page, WIDEST))
    assert all(sum(panel.width for panel in row) <= WIDEST for row in rows)
    for page in found[:: max(len(found) - 1, 1)]:  # the first and the last one
        figure = Figure()
        draw(figure, page, words_of(history, "A run"), step_axis(history), widest=WIDEST)
        width, height = figure.get_size_inches()
        assert 6 < width < 16
        assert height <= 1.05 * TALLEST * width
    if len(found) > 1:
        fewest = min(sum(panel.width * panel.height for panel in page) for page in found)
        assert fewest > 3


@pytest.mark.slow
def test_a_second_screen_with_many_quantities_has_pages(tmp_path: Path) -> None:
    history = realistic(2, LAYERED[:5], layers=12)
    plotter = CockpitPlotter(secondary_screen=True)
    plotter.plot(
        history, show_plot=False, save_plot=True, savedir=tmp_path, savename="run",
        savefig_kwargs={"dpi": 30},
    )  # fmt: skip
    shown = plotter.secondary_figures
    assert len(shown) > 1
    assert shown[0] is plotter.secondary_figure
    assert sum(len(titles(figure)) for figure in shown) >= len(layer_panels(history))
    assert f"Cockpit, page 2 of {len(shown)}" in words(shown[1])
    files = ["primary", "secondary", *(f"secondary_{n}" for n in range(2, len(shown) + 1))]
    assert {path.stem for path in tmp_path.iterdir()} == {
        f"run__{screen}"
        for screen in files
        if screen != "primary" or plotter.figure is not shown[0]
    }


# What can't be drawn, and texts as they are -----------------------------------------------------


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
    figure = drawn(history, plot_title="$t^$")
    image = BytesIO()
    figure.savefig(image, format="svg")
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", image.getvalue().decode())
    assert {"$\\frac{$", "$t^$", "$p^$"} <= {*shown}


# Files that are whole, or not there at all --------------------------------------------------------

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
