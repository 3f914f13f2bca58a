"""The page of some runs: one file that needs nothing else, or a document of bokeh's server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.events import DocumentReady
from bokeh.models import ColumnDataSource, CustomJS
from bokeh.resources import INLINE
from jinja2 import Environment, Template

from gradlens.history.coverage import few
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.run_file import replacing
from gradlens.instruments.scales import StepAxis, number_label
from gradlens.instruments.style import Color, categorical_colors
from gradlens.plotting.comparison import run_colors
from gradlens.plotting.findings import findings_of, main_findings
from gradlens.plotting.output import check_suffix
from gradlens.plotting.panels import nothing
from gradlens.report.cards import Card, LinesCard, MapCard, PictureCard, ShapesCard
from gradlens.report.columns import has_trend
from gradlens.report.content import cards
from gradlens.report.figures import Drawn, draw, has_points, height, is_drawn
from gradlens.report.marks import columns
from gradlens.report.overview import facts, last_values
from gradlens.report.palette import (
    DENSITY,
    DENSITY_IN_DARK,
    IN_DARK,
    LIGHT,
    SIGNED,
    SIZES,
    gradient,
    in_dark,
    in_light,
    palette,
    variables,
)
from gradlens.report.shared import ends, shared
from gradlens.report.updating import update
from gradlens.report.value_axis import scale, threshold


@dataclass(frozen=True)
class Page:
    """What a page shows: its cards, the range of all steps, and what is wrong with each run."""

    title: str
    runs: Mapping[str, History]
    cards: tuple[Card, ...]
    axis: StepAxis
    findings: Mapping[str, tuple[Finding, ...]]

    @property
    def marks(self) -> Mapping[str, Any]:
        """The columns of the marks of a single run's findings; of several runs there are none."""
        return columns(*self.findings.values()) if len(self.runs) == 1 else {}


def page(runs: Mapping[str, History], title: str) -> Page:
    """The page of some runs by name; ``ValueError`` if there is nothing to show."""
    found = cards(runs)
    if not found:
        raise ValueError(nothing(next(iter(runs.values()))))
    steps = [
        step for history in runs.values() for step in (*history.steps[:1], *history.steps[-1:])
    ]
    findings = {name: findings_of(history) for name, history in runs.items()}
    return Page(title, runs, found, StepAxis(min(steps), max(steps)), findings)


def waiting(document: Document, news: str) -> None:
    """Make a document say why there is no page yet; it is loaded again after two seconds."""
    document.template = _template("waiting.html")
    document.template_variables["news"] = news


def write(shown: Page, path: Path) -> None:
    """Write a page as one file that needs no network; folders are made."""
    check_suffix(path, (".html", ".htm"))
    document = Live(shown).document(Document())
    html = file_html(
        document,
        INLINE,
        shown.title,
        template=document.template,
        template_variables=document.template_variables,
    )
    with replacing(path) as partial:
        partial.write_text(html, "utf-8")


class Live:
    """A page whose document can be brought up to date."""

    def __init__(self, shown: Page) -> None:
        self.page = shown
        self._drawn: tuple[Drawn, ...] = ()
        self._marks: Mapping[str, ColumnDataSource] = {}
        self._status = ColumnDataSource(data=_status(shown))

    def document(self, document: Document, live: bool = False) -> Document:
        """Fill a new document with the page."""
        shown, common = self.page, shared(self.page.axis, self.page.marks)
        self._marks = common.marks
        found = zip(shown.cards, _keys(shown.cards), strict=True)
        self._drawn = tuple(draw(card, key, common, shown.axis) for card, key in found)
        plots = [one for drawn in self._drawn for one in drawn.figures]
        frames = [drawn.frame for drawn in self._drawn if drawn.frame is not None]
        models: dict[str, Any] = {
            "plots": plots,
            "frames": frames,
            "xRange": common.x_range,
            "ticks": common.ticks,
            "logTicks": common.log_ticks,
            "places": common.places,
            "span": common.span,
            "density": common.mappers["density"],
            "densities": {"light": palette(DENSITY), "dark": palette(DENSITY_IN_DARK)},
        }
        # A root, so that all models are the document's before their figures are drawn.
        self._status.update(name="status", tags=[models])
        with document.models.freeze():  # otherwise all models are collected for each root
            for root in (self._status, *frames):
                document.add_root(root)
        start = CustomJS(args={"status": self._status}, code="gradlens.start(status)")
        document.js_on_event(DocumentReady, start)
        document.title = shown.title
        document.template = _template("page.html")
        document.template_variables.update(_variables(shown, live))
        return document

    def update(self, shown: Page) -> None:
        """Show a later state of the same runs."""
        if _skeleton(shown) != _skeleton(self.page):
            # Only a new document has other figures. The page is loaded again.
            self._status.data = _status(shown) | {"reload": [True]}
            return
        self.page = shown
        for card, drawn in zip(shown.cards, self._drawn, strict=True):
            update(drawn, card, shown.axis)
        for kind, found in shown.marks.items():
            self._marks[kind].data = dict(found)
        self._status.data = _status(shown)


def _skeleton(shown: Page) -> list[Any]:
    """What can't be changed in a document."""
    found = [(card.title, is_drawn(card), _names(card), _axis(card)) for card in shown.cards]
    return [*found, *shown.marks]


def _axis(card: Card) -> Any:
    if isinstance(card, LinesCard):
        return scale(card), threshold(card)
    return (
        (type(card.map.norm), (card.map.norm.vmin or 0.0) < 0)
        if isinstance(card, MapCard)
        else None
    )


def _names(card: Card) -> Sequence[Any]:
    if isinstance(card, LinesCard):
        found = [(c.name, has_points(c), has_trend(c.line), len(c.spreads)) for c in card.curves]
        return [*found, card.lines.danger is None]
    if isinstance(card, ShapesCard):
        return [name for name, *_ in card.shapes]
    return card.map.table.names if isinstance(card, MapCard) else ()


def _status(shown: Page) -> Any:
    """What changes on a page besides the figures."""
    low, high = ends(shown.axis)
    bars = {
        key: [_bar(card)[0], _bar(card)[2]]
        for card, key in zip(shown.cards, _keys(shown.cards), strict=True)
        if isinstance(card, MapCard)
    }
    words = {
        key: card.words
        for card, key in zip(shown.cards, _keys(shown.cards), strict=True)
        if isinstance(card, PictureCard)
    }
    latest = {
        key: card.lines.readout
        for card, key in zip(shown.cards, _keys(shown.cards), strict=True)
        if isinstance(card, LinesCard)
    }
    found = {
        "head": _head(shown),
        "latest": latest,
        "bars": bars,
        "words": words,
        "low": low,
        "high": high,
        "reload": False,
    }
    return {name: [one] for name, one in found.items()}


def _keys(found: Sequence[Card]) -> list[str]:
    return [f"card{n}" for n in range(len(found))]


# Templates ----------------------------------------------------------------------------------

FILES = files("gradlens.report") / "assets"


def _template(name: str) -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "light": in_light,
        "dark": in_dark,
        "few": few,
        "number": number_label,
        "main": main_findings,
    }
    return environment.from_string((FILES / name).read_text("utf-8"))


def _head(shown: Page) -> str:
    """The facts of all runs and the table of their last values as HTML."""
    colors = run_colors([*shown.runs])
    runs = [
        facts(name, history, colors[name], shown.findings[name])
        for name, history in shown.runs.items()
    ]
    return _template("head.html").render(runs=runs, rows=last_values(shown.runs))


def _variables(shown: Page, live: bool) -> dict[str, Any]:
    sections: dict[str, list[dict[str, Any]]] = {}
    for card, key in zip(shown.cards, _keys(shown.cards), strict=True):
        sections.setdefault(card.group, []).append(_view(card, key))
    return {
        "heading": shown.title,
        "css": (FILES / "page.css").read_text("utf-8"),
        "js": (FILES / "page.js").read_text("utf-8"),
        "light": variables({**LIGHT, "density": gradient(DENSITY)}),
        "dark": variables({**IN_DARK, "density": gradient(DENSITY_IN_DARK)}),
        "runs": run_colors([*shown.runs]) if len(shown.runs) > 1 else {},
        "sections": [(group, found, _balanced(found)) for group, found in sections.items()],
        "head": _head(shown),
        "live": live,
    }


def _balanced(found: Sequence[Any]) -> str:
    """For 4, 3 and 2 columns at most, the number of columns that makes rows about equally long."""
    counts = {most: -(-len(found) // -(-len(found) // most)) for most in (4, 3, 2)}
    return " ".join(f"--most-{most}: {count};" for most, count in counts.items())


def _view(card: Card, key: str) -> dict[str, Any]:
    """A card as the template shows it around its figures."""
    return {
        "key": key,
        "card": card,
        "curves": _entries(card),
        "why": "" if is_drawn(card) else _why(card),
        "height": height(card),
        "bar": _bar(card) if isinstance(card, (MapCard, PictureCard)) else None,
    }


def _entries(card: Card) -> list[tuple[str, Color]]:
    if isinstance(card, LinesCard):
        return [(curve.name, curve.color) for curve in card.curves]
    if isinstance(card, ShapesCard):
        return [(name, color) for name, _, _, color in card.shapes]
    return [(card.words, categorical_colors(1)[0])] if isinstance(card, MapCard) else []


def _why(card: Card) -> str:
    """Why a card has nothing to draw."""
    assert isinstance(card, LinesCard)
    reasons = [reason for gaps in card.gaps for reason in gaps.reasons]
    return reasons[-1] if reasons else "nothing recorded yet"


def _bar(card: MapCard | PictureCard) -> tuple[str, str, str]:
    """The colours of a map: its smallest value, the colours as CSS, its largest value."""
    if isinstance(card, PictureCard):
        return "few", "var(--density)", "many"
    low, high = card.map.norm.vmin or 0.0, card.map.norm.vmax or 0.0
    return number_label(low), gradient(SIGNED if low < 0 else SIZES), number_label(high)
