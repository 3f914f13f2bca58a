"""The page of a run: what is on it, and what it does in a browser."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.document import Document
from bokeh.models import ColumnDataSource

from gradlens.cli.main import main
from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.history.records import Note, Source
from gradlens.history.setup import ParameterGroup, Setup
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.instruments.panel import Content, Lines
from gradlens.instruments.scales import StepAxis, number_label
from gradlens.plotting.screen import EPOCHS, Screen
from gradlens.report.content import Card, cards
from gradlens.report.page import Live, Page, page, write
from gradlens.report.plots import plots
from gradlens.report.serving import Following, free_port
from tests.instruments.test_instruments import realistic, same
from tests.report.browser import CHROMIUM, Tab, chromium

HOSTILE = "</script><script>document.title = 'broken'</script><img src=x> & $x^2$ {{ 7 }}"
REASON = "the parabola has no minimum </p>"

AXIS = StepAxis(0, 40)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


def full(steps: int = 300) -> History:
    """A run with everything, a hostile note and a hostile name."""
    history = realistic(steps)
    history.sources[HOSTILE] = Source((), View(HOSTILE, label=HOSTILE))
    for step in range(steps):
        gap = 100 <= step < 110
        value = Undefined(REASON) if gap else math.inf if step == 120 else 1.0 + step
        history.append(step, {HOSTILE: value})
    history.notes.append(Note(3, HOSTILE))
    return history


def steady(steps: int) -> History:
    """A loss and a norm for each parameter that need no other axes when they go on."""
    views = {"Loss": View("Loss", "performance"), "GradNorm": View("Gradient norm", "step size")}
    history = History({name: Source((name,), view) for name, view in views.items()})
    history.parameters = {"weight": (2, 2), "bias": (2,)}
    for step in range(steps):
        norms = {"weight": 1 + step / 100, "bias": 2.0}
        history.append(step, {"Loss": 3 - step / 100, "GradNorm": norms})
    return history


def curves(card: Card) -> list[str]:
    shown = card.panel.content
    return [curve.name for curve in shown.curves] if isinstance(shown, Lines) else []


def contents(*histories: History) -> dict[str, Content]:
    """What the cards show by their titles."""
    runs = {str(place): history for place, history in enumerate(histories)}
    return {card.panel.title: card.panel.content for card in cards(runs)}


def faulty(steps: int) -> History:
    """A run whose optimizer lacks a parameter from step 5 on."""
    history = steady(steps)
    everything = (ParameterGroup({}, ("weight", "bias")),)
    history.setups[0] = Setup("SGD", everything)
    if steps > 5:
        history.setups[5] = Setup("SGD", everything, missed=("bias",))
    return history


# Content ------------------------------------------------------------------------------------


def test_findings_are_listed_and_marked() -> None:
    shown = page({"run": faulty(20)}, "")
    html = str(Live(shown)._status.data["head"][0])
    assert "The optimizer lacks trainable parameters" in html
    assert "since step 5" in html
    assert "What to do" in html
    document = Live(shown).document(Document())
    sources: list[Any] = [*document.select({"type": ColumnDataSource})]
    marks = [source.data for source in sources if "number" in source.data]
    assert marks
    assert all(one == {"step": [5.0], "number": ["1"]} for one in marks)


def marked(shown: Page) -> bool:
    """Whether any figure has marks of findings."""
    layers = [one for found in shown.plots.values() for plot in found for one in plot.layers]
    return any(one.name in ("alarms", "notices") for one in layers)


def test_a_run_without_a_number_has_a_page() -> None:
    nothing = same(realistic(5), lambda step, old: Undefined(REASON))
    assert page({"run": nothing}, "").cards


def test_a_healthy_run_has_neither_a_list_nor_marks() -> None:
    shown = page({"run": steady(20)}, "")
    assert "findings" not in str(Live(shown)._status.data["head"][0])
    assert not marked(shown)


def test_several_runs_have_lists_and_no_marks() -> None:
    shown = page({"a": faulty(20), "b": faulty(30)}, "")
    assert str(Live(shown)._status.data["head"][0]).count("The optimizer lacks") == 2
    assert not marked(shown)


@pytest.mark.slow
def test_a_first_finding_loads_a_live_page_again_and_a_later_one_does_not() -> None:
    live = Live(page({"run": faulty(4)}, ""))
    live.document(Document(), live=True)
    live.update(page({"run": faulty(20)}, ""))
    assert live._status.data["reload"] == [True]
    live = Live(page({"run": faulty(20)}, ""))
    live.document(Document(), live=True)
    live.update(page({"run": faulty(21)}, ""))
    assert live._status.data["reload"] == [False]


def lines_of(history: History) -> dict[str, Lines]:
    """The lines of the figure's panels by the names of their series."""
    found = {}
    for panel in Screen("").panels(history):
        if isinstance(panel.content, Lines):
            found |= dict.fromkeys(panel.names, panel.content)
    return found


def test_numbers_of_the_summary_are_on_the_page_if_no_panel_has_lines_of_their_series() -> None:
    history = full(40)
    shown = {*lines_of(history), EPOCHS}
    wanted = {one.name: one for one in history.scalars() if one.series not in shown}
    assert {"GradHist1d clipped", "GradHist2d clipped"} <= {*wanted}
    found = {c.name: c.line for one in contents(history).values() if isinstance(one, Lines)
             for c in one.all_curves}  # fmt: skip
    for name, one in wanted.items():
        np.testing.assert_array_equal(found[name].values, one.line.values)


def test_lines_are_those_of_the_figure() -> None:
    history = full(40)
    found = [one for one in contents(history).values() if isinstance(one, Lines)]
    for lines in lines_of(history).values():
        names = {curve.name for curve in lines.curves}
        assert any({curve.name for curve in one.curves} == names for one in found)
    by_title = {card.panel.title: card for card in cards({"run": history})}
    stability, trace = by_title["Edge of stability"], by_title["Hessian trace"]
    drawn = [[one.name for one in plots(card, AXIS)[0].layers] for card in (stability, trace)]
    assert [names.count("values") for names in drawn] == [2, 1]
    assert [names.count("band") for names in drawn] == [1, 1]


def test_a_missing_value_says_why() -> None:
    (card,) = [card for card in cards({"run": full(150)}) if card.panel.title == HOSTILE]
    (gaps,) = card.gaps
    assert gaps == dict.fromkeys(range(100, 110), REASON) | {120: "infinite"}


def test_several_runs_share_a_card_for_each_number() -> None:
    runs = {"a": full(30), "b": realistic(20, ("Loss", "GradNorm"))}
    by_title = {card.panel.title: card for card in cards(runs)}
    assert curves(by_title["Loss"]) == ["a", "b"]
    assert curves(by_title[HOSTILE]) == ["a"]


def test_nothing_to_show_is_said() -> None:
    with pytest.raises(ValueError, match="history is empty"):
        page({"run": History()}, "A run")


# The file -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    path = folder / "run.jsonl"
    full().write(path)
    return path


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    assert main(["report", str(run), "--title", HOSTILE]) == 0
    return run.with_suffix(".html")


@pytest.mark.slow
def test_a_cut_off_run_is_shown_up_to_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = folder / "whole.jsonl", folder / "cut.jsonl"
    steady(9).write(whole)
    cut.write_bytes(whole.read_bytes()[:-20])
    assert main(["report", str(cut)]) == 0
    text = cut.with_suffix(".html").read_text("utf-8")
    assert "8 steps, 0 to 7" in text
    assert "its last line is cut off" in text
    assert f"report: {cut.with_suffix('.html')}" in capsys.readouterr().out


def test_another_ending_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "-o", str(run.with_suffix(".pdf"))]) == 1
    assert "use one of .html, .htm" in capsys.readouterr().err


# In a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab(report: Path) -> Iterator[Tab]:
    """The page of the run, drawn; tests leave it as they find it."""
    with chromium() as found:
        found.open(report.as_uri())
        yield found


@pytest.fixture
def other(tab: Tab) -> Tab:
    """The same browser for another page; it comes last, as it closes the run's page."""
    return tab


RANGES = """JSON.stringify(Bokeh.documents[0].roots().flatMap(root => root.children ?? [])
    .filter(plot => plot.tags?.[0]?.steps).map(plot => [plot.x_range.start, plot.x_range.end]))"""


def ranges(tab: Tab) -> set[tuple[float, float]]:
    """Those of all figures over steps; more of them may be drawn meanwhile."""
    return {(start, end) for start, end in json.loads(tab.value(RANGES))}


def box(tab: Tab, selector: str) -> Any:
    found = f"JSON.stringify(document.querySelector({selector!r}).getBoundingClientRect())"
    return json.loads(tab.value(found))


def value_of(tab: Tab, title: str) -> str:
    """What stands to the right of a panel's title."""
    found = tab.value(
        f"[...document.querySelectorAll('.card')].find(card => card.querySelector('h3').textContent"
        f" === {json.dumps(title)}).querySelector('output').textContent"
    )
    return str(found)


@needs_chromium
@pytest.mark.slow
def test_it_needs_no_network_and_has_no_errors(tab: Tab) -> None:
    assert {url.partition(":")[0] for url in tab.requests} <= {"file", "data", "blob"}
    assert tab.errors == []


@needs_chromium
@pytest.mark.slow
def test_a_print_has_the_width_of_the_paper(tab: Tab) -> None:
    across = "[...document.querySelectorAll('.cards')].map(e => e.getBoundingClientRect().right)"
    tab.value("dispatchEvent(new Event('beforeprint'))")
    assert tab.value(f"Math.max(...{across})") <= 700
    tab.value("dispatchEvent(new Event('afterprint'))")
    assert tab.value(f"Math.max(...{across})") > 1000
    assert tab.errors == []


@needs_chromium
@pytest.mark.slow
def test_titles_and_notes_are_text(tab: Tab) -> None:
    assert tab.value("document.title") == HOSTILE
    assert tab.value("document.querySelector('h1').textContent") == HOSTILE
    assert HOSTILE in tab.value("document.querySelector('#head details').textContent")
    assert tab.value("document.querySelectorAll('img').length") == 0


@needs_chromium
@pytest.mark.slow
def test_zooming_changes_all_panels(tab: Tab) -> None:
    place = box(tab, ".figure")
    y = place["top"] + 60
    whole = ranges(tab)
    tab.drag((place["left"] + 150, y), (place["left"] + 250, y + 10))
    tab.wait("location.hash.startsWith('#steps=')")
    zoomed = ranges(tab)
    ((low, high),), ((start, end),) = zoomed, whole
    assert high - low < 0.6 * (end - start)
    tab.click(place["left"] + 150, y, count=2)
    tab.wait("location.hash === '#all'")
    assert ranges(tab) == whole


@needs_chromium
@pytest.mark.slow
def test_the_pointer_shows_one_step_in_all_panels(tab: Tab) -> None:
    tab.value("gradlens.hover(105, 0, null)")
    tab.wait("document.querySelector('#step').textContent === 'step 105'")
    losses, rates = (line(full()[name]) for name in ("Loss", "learning_rate"))
    assert value_of(tab, "Loss") == number_label(losses.values[105])
    nearest = np.abs(rates.steps - 105).argmin()
    assert value_of(tab, "Learning rate") == number_label(rates.values[nearest])
    assert value_of(tab, HOSTILE) == "NaN"
    assert REASON in tab.value("document.querySelector('.reason:not([hidden])').textContent")
    tab.value("gradlens.hover(120, 0, null)")
    tab.wait("document.querySelector('#step').textContent === 'step 120'")
    assert value_of(tab, HOSTILE) == "∞"
    tab.value("gradlens.leave()")
    tab.wait("document.querySelector('#step').textContent === ''")
    assert value_of(tab, HOSTILE) == "300"


@needs_chromium
@pytest.mark.slow
def test_numbers_are_written_as_in_the_figure(tab: Tab) -> None:
    values = [0, 1, -0.25, 12.5, 2.5e-5, 3e6, 99_999.4, 123456, 1e-3, 0.99999e-3, 1 / 3, 12345.678]
    found = json.loads(tab.value(f"JSON.stringify({values}.map(v => gradlens.valueLabel(v, 0)))"))
    assert found == [number_label(value) for value in values]


@needs_chromium
@pytest.mark.slow
def test_a_click_on_a_row_of_a_map_shows_its_line(tab: Tab) -> None:
    tab.value("document.querySelector('.maps').scrollIntoView()")
    tab.wait("!!Bokeh.index.find_one(gradlens.plot('Gradient norm by parameter'))?.has_finished()")
    below = "gradlens.plot('Gradient norm by parameter', 1)"
    assert tab.value(f"{below}.visible") is False
    place = box(tab, ".maps .figure")
    tab.click(place["left"] + 200, place["top"] + 15)
    tab.wait(f"{below}.visible")
    assert tab.value(f"{below}.renderers[0].glyph.y.field") == "row 0"
    assert tab.errors == []


@needs_chromium
@pytest.mark.slow
def test_the_address_has_the_range(tab: Tab) -> None:
    whole = ranges(tab)
    tab.value("location.hash = '#steps=50..90'")
    tab.wait("!document.querySelector('#reset').hidden")
    assert ranges(tab) == {(50, 90)}
    tab.value("document.querySelector('#reset').click()")
    assert ranges(tab) == whole


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 400])
def test_it_fits_the_screen(tab: Tab, width: int, dark: bool) -> None:
    tab.screen(width, 800, dark)
    assert tab.value("document.documentElement.scrollWidth") == width
    across = tab.value("new Set([...document.querySelectorAll('.card')].slice(6, 12)"
                           ".map(card => card.offsetLeft)).size")  # fmt: skip
    assert across == 1 if width == 400 else across >= 3
    background = tab.value("getComputedStyle(document.documentElement).backgroundColor")
    shade = np.mean([int(channel) for channel in re.findall(r"\d+", background)])
    assert shade < 60 if dark else shade > 200
    assert tab.errors == []
    tab.screen(1440, 900)


@needs_chromium
@pytest.mark.slow
def test_runs_can_be_switched_off(other: Tab, folder: Path) -> None:
    out = folder / "runs.html"
    kinds = ("Loss", "GradNorm")
    write(page({"a": realistic(200, kinds), "b": realistic(100, kinds)}, "Two runs"), out)
    other.open(out.as_uri())
    visible = "gradlens.plot('Loss').renderers.filter(r => r.name === 'values').map(r => r.visible)"
    assert other.value(visible) == [True, True]
    other.value("document.querySelector('button.run[data-run=b]').click()")
    assert other.value(visible) == [True, False]
    table = other.value("document.querySelector('table').textContent")
    assert "Loss" in table
    assert other.errors == []


# Live ---------------------------------------------------------------------------------------


class Session:
    """A document of the server, without one."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self.following = Following(paths, "Live", 0.0)
        shown = self.following.page()
        assert shown is not None
        self.live = Live(shown)
        self.document = self.live.document(Document(), live=True)

    def refresh(self) -> None:
        """Read on, which takes no more than half of the time."""
        shown = self.following.page()
        while shown is self.live.page or shown is None:
            shown = self.following.page()
        self.live.update(shown)

    def data(self, name: str) -> dict[str, Any]:
        """The columns of the first source or glyph with a name."""
        first: Any = next(iter(self.document.select({"name": name})))
        found: dict[str, Any] = first.data if name == "status" else first.data_source.data
        return found


def test_what_was_added_is_shown(tmp_path: Path) -> None:
    path, whole = tmp_path / "run.jsonl", tmp_path / "whole.jsonl"
    steady(60).write(whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:56]))
    session = Session({"run": path})
    assert len(session.data("values")["step"]) == 55
    path.write_bytes(b"".join(lines))
    session.refresh()
    assert session.data("values")["step"].tolist() == [*range(60)]
    assert "60 steps, 0 to 59" in session.data("status")["head"][0]
    assert session.data("status")["reload"] == [False]


def test_a_page_with_another_panel_is_loaded_again(tmp_path: Path) -> None:
    path, whole = tmp_path / "run.jsonl", tmp_path / "whole.jsonl"
    realistic(5, ("Loss",)).write(path)
    session = Session({"run": path})
    realistic(5, ("Loss", "GradNorm")).write(whole)
    path.write_bytes(whole.read_bytes())
    session.refresh()
    assert session.data("status")["reload"] == [True]


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    following = Following({"run": path}, "Live", 0.0)
    assert following.page() is None
    assert following.news == f"waiting for {path}"
    realistic(3, ("Loss",)).write(path)
    assert following.page() is not None


def test_another_port_is_taken_if_the_wish_is_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) != port


@needs_chromium
@pytest.mark.slow
def test_a_browser_follows_a_run(other: Tab, tmp_path: Path) -> None:
    path, whole = tmp_path / "run.jsonl", tmp_path / "whole.jsonl"
    steady(60).write(whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:56]))
    command = [
        sys.executable,
        "-m",
        "gradlens",
        "serve",
        str(path),
        "--no-open",
        "--interval",
        "0.2",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[2]
            assert address.startswith("http://127.0.0.1:")
            other.open(address)
            assert value_of(other, "Loss") == number_label(3 - 0.54)
            path.write_bytes(b"".join(lines))
            other.wait("document.querySelector('.card output')?.textContent === '2.41'")
            assert "60 steps" in other.value("document.querySelector('#head').textContent")
            assert {url.split("/")[2] for url in other.requests} == {address.split("/")[2]}
            assert other.errors == []
        finally:
            # An interrupt is ignored by what a shell has started in the background.
            process.terminate()
            ended = process.wait(30)
    assert ended == 0
