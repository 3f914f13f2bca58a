"""The page of some runs: one file that needs nothing else, or a document of bokeh's server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.events import DocumentReady
from bokeh.models import ColumnDataSource, CustomJS
from bokeh.resources import INLINE
from jinja2 import Environment, Template

from gradlens.history.coverage import CoverageTable, few
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.history.records import Note
from gradlens.history.run_file import replacing
from gradlens.instruments import BUILT_IN, Instrument
from gradlens.instruments.lines import why_empty
from gradlens.instruments.panel import Content, Lines, Map, Picture, Shapes
from gradlens.instruments.scales import StepAxis, number_label
from gradlens.instruments.style import Color, categorical_colors
from gradlens.plotting.comparison import Number, numbers, run_colors
from gradlens.plotting.findings import findings_of, main_findings
from gradlens.plotting.output import check_suffix
from gradlens.plotting.panels import nothing
from gradlens.report.axes import (
    IN_DARK,
    LIGHT,
    OF_THE_GROUND,
    SIGNED,
    SIZES,
    columns,
    gradient,
    in_dark,
    in_light,
    palette,
    shared,
    variables,
)
from gradlens.report.columns import has_trend
from gradlens.report.content import Card, cards
from gradlens.report.figures import DrawnCard, draw, has_points, height, is_drawn, update


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


def page(
    runs: Mapping[str, History], title: str, instruments: Sequence[Instrument] = BUILT_IN
) -> Page:
    """The page of some runs by name; ``ValueError`` if there is nothing to show."""
    found = cards(runs, instruments)
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
        self._drawn: tuple[DrawnCard, ...] = ()
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
            "mappers": {name: common.mappers[name] for name in OF_THE_GROUND},
            "palettes": {
                name: {"light": palette(light), "dark": palette(dark)}
                for name, (light, dark) in OF_THE_GROUND.items()
            },
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
    """What can't be changed in a document: what cards consist of, and their axes."""
    found = [(card.panel.title, is_drawn(card), _parts(card)) for card in shown.cards]
    return [*found, *shown.marks]


def _parts(card: Card) -> Any:
    match card.panel.content:
        case Lines() as one:
            found = [
                (curve.name, has_points(curve), has_trend(curve.line), len(curve.spreads))
                for curve in one.all_curves
            ]
            return found, one.danger is None, card.up.scale, card.up.linear
        case Map() as one:
            return one.table.names, type(one.norm), one.colors
        case Shapes() as one:
            return [(shape.name, shape.kind) for shape in one.shapes], one.key
        case other:
            return type(other)


def _status(shown: Page) -> Any:
    """What changes on a page besides the figures."""
    low, high = shown.axis.ends
    keyed = [*zip(shown.cards, _keys(shown.cards), strict=True)]
    contents = [(card.panel.content, key) for card, key in keyed]
    bars = {key: [_bar(one)[0], _bar(one)[2]] for one, key in contents if isinstance(one, Map)}
    # The second line of these cards are words that change with the step.
    words = {
        key: card.words
        for card, key in keyed
        if isinstance(one := card.panel.content, Picture)
        or (isinstance(one, Shapes) and not one.key)
    }
    latest = {key: one.readout for one, key in contents if isinstance(one, Lines)}
    found = {
        "head": _head(shown),
        "latest": latest,
        "bars": bars,
        "words": words,
        "pictures": {key: card.picture for card, key in keyed if card.picture},
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
    def balanced(count: int) -> str:
        """For 4, 3 and 2 columns at most, how many make rows about equally long."""
        counts = {most: -(-count // -(-count // most)) for most in (4, 3, 2)}
        return " ".join(f"--most-{most}: {number};" for most, number in counts.items())

    sections: dict[str, list[dict[str, Any]]] = {}
    for card, key in zip(shown.cards, _keys(shown.cards), strict=True):
        sections.setdefault(card.panel.group, []).append(_view(card, key))
    return {
        "heading": shown.title,
        "css": (FILES / "page.css").read_text("utf-8"),
        "js": (FILES / "page.js").read_text("utf-8"),
        "light": variables({**LIGHT, **{n: gradient(c) for n, (c, _) in OF_THE_GROUND.items()}}),
        "dark": variables({**IN_DARK, **{n: gradient(c) for n, (_, c) in OF_THE_GROUND.items()}}),
        "runs": run_colors([*shown.runs]) if len(shown.runs) > 1 else {},
        "sections": [(group, found, balanced(len(found))) for group, found in sections.items()],
        "head": _head(shown),
        "live": live,
    }


def _view(card: Card, key: str) -> dict[str, Any]:
    """A card as the template shows it around its figures."""
    shown = card.panel.content
    return {
        "key": key,
        "title": card.panel.title,
        "hint": card.hint,
        "words": card.words,
        "picture": card.picture,
        "curves": _entries(card),
        "why": "" if is_drawn(card) else _why(shown),
        "height": height(card),
        "bar": _bar(shown) if isinstance(shown, (Map, Picture)) else None,
    }


def _entries(card: Card) -> list[tuple[str, Color]]:
    match card.panel.content:
        case Lines() as lines:
            return [(curve.name, curve.color) for curve in lines.all_curves]
        case Shapes() as shapes:
            return [(entry.label, entry.color) for entry in shapes.key]
        case _:
            return [(card.words, categorical_colors(1)[0])]


def _why(shown: Content) -> str:
    """Why there is nothing to draw."""
    return (shown.message or why_empty(shown.lines)) if isinstance(shown, Lines) else ""


def _bar(shown: Map | Picture) -> tuple[str, str, str]:
    """The colours of a map: its smallest value, the colours as CSS, its largest value."""
    if isinstance(shown, Picture):
        return "few", "var(--density)", "many"
    low, high = shown.norm.vmin or 0.0, shown.norm.vmax or 0.0
    colors = {"sizes": gradient(SIZES), "signed": gradient(SIGNED), "signal": "var(--signal)"}
    return number_label(low), colors[shown.colors], number_label(high)


# What a page says about its runs besides the figures ------------------------------------------

NOTES = 50
"""So many of the latest notes are shown."""

FLAT = 0.0005
"""Relative difference below which two values count as equal."""


@dataclass(frozen=True)
class RunFacts:
    """A run in words; ``damage`` says what of its file could not be read."""

    name: str
    color: Color
    extent: str
    damage: str
    coverage: tuple[str, ...]
    notes: tuple[Note, ...]
    earlier_notes: int
    findings: tuple[Finding, ...] = ()


def facts(
    name: str, history: History, color: Color, findings: tuple[Finding, ...] = ()
) -> RunFacts:
    """The facts of a run, and what is wrong with it."""
    cut = "its last line is cut off" if history.truncated else ""
    damage = "; ".join(filter(None, (cut, history.damage)))
    notes = tuple(history.notes)
    return RunFacts(
        name, color, _extent(history), damage, _coverage(history), notes[-NOTES:][::-1],
        max(0, len(notes) - NOTES), findings,
    )  # fmt: skip


def _extent(history: History) -> str:
    steps = history.steps
    if not steps:
        return "no steps yet"
    if len(steps) == 1:
        return f"one step, {steps[0]:,}"
    words = [f"{len(steps):,} steps, {steps[0]:,} to {steps[-1]:,}", _duration(history)]
    return " · ".join(filter(None, words))


def _duration(history: History) -> str:
    """The time between the first and the last record, if there are time stamps."""
    for name in history.of_kind("Time"):
        stamps = line(history[name]).values
        seconds = float(np.ptp(stamps[np.isfinite(stamps)])) if stamps.size else 0.0
        if seconds >= 3600:
            return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
        if seconds >= 60:
            return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
        if seconds > 0:
            return f"{number_label(seconds, 2)} s"
    return ""


def _coverage(history: History) -> tuple[str, ...]:
    if not history.coverages:
        return ()
    latest = history.coverages[max(history.coverages)]
    return tuple(" ".join(row.split()) for row in CoverageTable(latest, history.parameters).short())


# Several runs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LastValues:
    """A number's last value in each run, and its difference from that of the first run."""

    title: str
    name: str
    cells: tuple[tuple[str, str], ...]


def last_values(runs: Mapping[str, History]) -> tuple[LastValues, ...]:
    """A row for each number that a run has; empty for a single run."""
    if len(runs) < 2:
        return ()
    return tuple(_row(one, [*runs]) for one in numbers(runs))


def _row(one: Number, runs: Sequence[str]) -> LastValues:
    found = [one.lines[run].latest if run in one.lines else None for run in runs]
    cells = tuple(
        ("—" if value is None else number_label(value), _difference(value, found[0]) if n else "")
        for n, value in enumerate(found)
    )
    return LastValues(one.title, one.scalar.name, cells)


def _difference(value: float | None, first: float | None) -> str:
    if value is None or first is None or not math.isfinite(value - first):
        return ""
    if abs(value - first) <= FLAT * max(abs(first), abs(value)):
        return "="
    if first > 0 and value > 0:
        ratio = value / first
        return (
            f"{100 * (ratio - 1):+.3g} %".replace("-", "−")
            if 0.01 < ratio < 10
            else (f"× {number_label(ratio)}")
        )
    sign = "+" if value > first else ""
    return f"{sign}{number_label(value - first)}"
