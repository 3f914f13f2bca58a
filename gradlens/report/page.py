"""The page of some runs: one file that needs nothing else, or a document of bokeh's server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.events import DocumentReady
from bokeh.models import Column, ColumnDataSource, CustomJS, Spacer
from bokeh.plotting import figure
from bokeh.resources import INLINE
from jinja2 import Environment, Template
from matplotlib.colors import to_hex

from gradlens.history.coverage import CoverageTable, few
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.history.run_file import replacing
from gradlens.instruments import BUILT_IN, Instrument
from gradlens.instruments.panel import Lines, Map, Picture, Shapes
from gradlens.instruments.scales import StepAxis, number_label
from gradlens.plotting.comparison import Number, numbers, run_colors
from gradlens.plotting.output import check_suffix
from gradlens.plotting.screen import nothing
from gradlens.plotting.summary import extent, findings_of, main_findings
from gradlens.report.content import Card, cards
from gradlens.report.figures import IN_DARK, LIGHT, Shared, draw, in_dark, update, variables
from gradlens.report.plots import Plot, plots


@dataclass(frozen=True)
class Page:
    """What a page shows: its cards by their keys, and what is wrong with each run.

    ``plots`` are the figures of each card, and ``axis`` is the range of all steps.
    """

    title: str
    runs: Mapping[str, History]
    cards: Mapping[str, Card]
    plots: Mapping[str, tuple[Plot, ...]]
    axis: StepAxis
    findings: Mapping[str, tuple[Finding, ...]]

    @property
    def skeleton(self) -> list[Any]:
        """What can't be changed in a document: what cards consist of, and their axes."""
        return [
            (card.panel.title, card.entries, [plot.skeleton for plot in self.plots[key]])
            for key, card in self.cards.items()
        ]


def page(
    runs: Mapping[str, History], title: str, instruments: Sequence[Instrument] = BUILT_IN
) -> Page:
    """The page of some runs by name; ``ValueError`` if there is nothing to show."""
    found = {f"card{n}": card for n, card in enumerate(cards(runs, instruments))}
    if not found:
        raise ValueError(nothing(next(iter(runs.values()))))
    steps = [
        step for history in runs.values() for step in (*history.steps[:1], *history.steps[-1:])
    ]
    axis = StepAxis(min(steps), max(steps))
    findings = {name: findings_of(history) for name, history in runs.items()}
    # The findings of several runs aren't marked.
    marked = next(iter(findings.values())) if len(runs) == 1 else ()
    drawn = {key: plots(card, axis, marked) for key, card in found.items()}
    return Page(title, runs, found, drawn, axis, findings)


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
        self._figures: Mapping[str, list[figure]] = {}
        self._status = ColumnDataSource(data=_status(shown))

    def document(self, document: Document, live: bool = False) -> Document:
        """Fill a new document with the page.

        The page puts the figures of a card into its frame as soon as that is on the screen, because
        drawing is what takes the time.
        """
        shown, common = self.page, Shared(self.page.axis)
        self._figures = {
            key: [draw(plot, common) for plot in found] for key, found in shown.plots.items()
        }
        for key, figures in self._figures.items():
            for number, one in enumerate(figures):
                one.name = f"{key}-{number}"
        frames = [
            Column(children=[Spacer(height=found[0].height)], name=key, sizing_mode="stretch_width")
            for key, found in shown.plots.items()
            if found
        ]
        every = [one for figures in self._figures.values() for one in figures]
        # A root, so that all models are the document's before their figures are drawn.
        models = {"plots": every, "frames": frames, **vars(common)}
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
        # Only a new document has other figures. The page is loaded again.
        reload = shown.skeleton != self.page.skeleton
        if not reload:
            self.page = shown
            for key, figures in self._figures.items():
                for one, plot in zip(figures, shown.plots[key], strict=True):
                    update(one, plot)
        self._status.data = _status(shown, reload)


def _status(shown: Page, reload: bool = False) -> Any:
    """What changes on a page besides the figures."""
    low, high = shown.axis.ends
    bars: dict[str, Any] = {}
    words: dict[str, str] = {}
    latest: dict[str, Any] = {}
    for key, card in shown.cards.items():
        match card.panel.content:
            case Lines() as one:
                latest[key] = one.readout
            case Map():
                bars[key] = (_bar(card) or ())[::2]
            case Picture() | Shapes(key=()):
                words[key] = card.words
    pictures = {key: card.picture for key, card in shown.cards.items() if card.picture}
    return {
        "head": [_head(shown)],
        "latest": [latest],
        "bars": [bars],
        "words": [words],
        "pictures": [pictures],
        "low": [low],
        "high": [high],
        "reload": [reload],
    }


# Templates ----------------------------------------------------------------------------------

FILES = files("gradlens.report") / "assets"


def _template(name: str) -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "light": to_hex,
        "dark": in_dark,
        "few": few,
        "number": number_label,
        "main": main_findings,
        "bar": _bar,
        "extent": _extent,
        "coverage": _coverage,
    }
    return environment.from_string((FILES / name).read_text("utf-8"))


def _head(shown: Page) -> str:
    """The facts of all runs and the table of their last values as HTML."""
    colors = run_colors([*shown.runs])
    runs = [
        {"name": name, "history": history, "color": colors[name], "findings": shown.findings[name]}
        for name, history in shown.runs.items()
    ]
    rows = [(one.title, one.scalar.name, _cells(one, [*shown.runs])) for one in numbers(shown.runs)]
    return _template("head.html").render(runs=runs, rows=rows if len(runs) > 1 else (), most=NOTES)


def _variables(shown: Page, live: bool) -> dict[str, Any]:
    def balanced(count: int) -> str:
        """For 4, 3 and 2 columns at most, how many make rows about equally long."""
        counts = {most: -(-count // -(-count // most)) for most in (4, 3, 2)}
        return " ".join(f"--most-{most}: {number};" for most, number in counts.items())

    sections: dict[str, list[Any]] = {}
    for key, card in shown.cards.items():
        sections.setdefault(card.panel.group, []).append((key, card, shown.plots[key]))
    return {
        "heading": shown.title,
        "css": (FILES / "page.css").read_text("utf-8"),
        "js": (FILES / "page.js").read_text("utf-8"),
        "light": variables(LIGHT, False),
        "dark": variables(IN_DARK, True),
        "runs": run_colors([*shown.runs]) if len(shown.runs) > 1 else {},
        "sections": [(group, found, balanced(len(found))) for group, found in sections.items()],
        "head": _head(shown),
        "live": live,
    }


def _bar(card: Card) -> tuple[str, str, str] | None:
    """The colours of a map: its smallest value, the colours as CSS, its largest value."""
    match card.panel.content:
        case Picture():
            return "few", "var(--density)", "many"
        case Map(norm=norm, colors=colors):
            low, high = norm.vmin or 0.0, norm.vmax or 0.0
            return number_label(low), f"var(--{colors})", number_label(high)
    return None


# What a page says about its runs besides the figures ------------------------------------------

NOTES = 50
"""So many of the latest notes are shown."""

FLAT = 0.0005
"""Relative difference below which two values count as equal."""


def _extent(history: History) -> str:
    """How far a run goes, and the time that it has taken, if there are time stamps."""
    for name in history.of_kind("Time")[:1]:
        stamps = line(history[name])
        known = stamps.values[stamps.finite]
        seconds = round(float(np.ptp(known))) if known.size else 0
        return f"{extent(history)} · {timedelta(seconds=seconds)}"
    return extent(history)


def _coverage(history: History) -> tuple[str, ...]:
    latest = history.latest("coverage")
    table = None if latest is None else CoverageTable(latest, history.parameters)
    return () if table is None else tuple(" ".join(row.split()) for row in table.short())


def _cells(one: Number, runs: Sequence[str]) -> list[tuple[str, str]]:
    """A number's last value in each run, and its difference from that of the first run."""
    found = [one.lines[run].latest if run in one.lines else None for run in runs]
    return [
        ("—" if value is None else number_label(value), _difference(value, found[0]) if n else "")
        for n, value in enumerate(found)
    ]


def _difference(value: float | None, first: float | None) -> str:
    if value is None or first is None or not math.isfinite(value - first):
        return ""
    if abs(value - first) <= FLAT * max(abs(first), abs(value)):
        return "="
    if first > 0 and value > 0:
        ratio = value / first
        if 0.01 < ratio < 10:
            return f"{100 * (ratio - 1):+.3g} %".replace("-", "−")
        return f"× {number_label(ratio)}"
    sign = "+" if value > first else ""
    return f"{sign}{number_label(value - first)}"
