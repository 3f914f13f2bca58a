"""From histories to the cards of a page: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from gradlens.history.history import History
from gradlens.history.records import Source
from gradlens.history.scalars import Scalar
from gradlens.history.series import Series
from gradlens.instruments import BUILT_IN, Instrument, LayerMapInstrument
from gradlens.instruments.maps import GREY
from gradlens.instruments.panel import Curve, Drawn, Grid, Lines, Map, Panel, Shapes
from gradlens.instruments.scales import value_scale
from gradlens.instruments.style import DOT
from gradlens.plotting.comparison import lines_of, numbers, run_colors
from gradlens.plotting.panels import EPOCHS, GROUPS, main_parts, panels
from gradlens.report.gaps import Gaps, gaps
from gradlens.report.hints import HINTS

UNITS = {
    "s/step": "s/step",
    "samples": "samples",
    "batch size": "samples",
}
"""Units by the part of a series, or by the label of its view; other numbers have none."""

WORDS = {"clipped": "share of elements out of range"}
"""What the part of a series is."""


@dataclass(frozen=True, eq=False)
class Card:
    """A panel of a page, what to look for in it, and the gaps of its curves."""

    panel: Panel
    hint: str = ""
    gaps: tuple[Gaps, ...] = ()

    @property
    def words(self) -> str:
        """What the numbers are."""
        shown = self.panel.content
        if isinstance(shown, (Drawn, Grid)):
            return ""
        return shown.words + f"{DOT}{GREY}" * (isinstance(shown, Map) and shown.has_grey)


def cards(
    runs: Mapping[str, History], instruments: Sequence[Instrument] = BUILT_IN
) -> tuple[Card, ...]:
    """The cards of a page, group by group: those of one run, or of a comparison."""
    single = next(iter(runs.values()))
    found = _of_one(single, instruments) if len(runs) == 1 else _of_several(runs)
    return tuple(sorted(found, key=lambda card: GROUPS.index(card.panel.group)))


# One run ------------------------------------------------------------------------------------


def _of_one(history: History, instruments: Sequence[Instrument]) -> list[Card]:
    """The panels of a figure, numbers of what has no lines among them, and maps of layers.

    Shapes beside the lines of a panel have a card of their own, and those at single steps are shown
    at all steps. What only matplotlib draws is left out.
    """
    main = panels(main_parts(history, instruments), history)
    maps = panels(LayerMapInstrument().parts(history), history)
    found: list[Card] = []
    titles: dict[str, str] = {}
    shown: set[str] = set()
    for panel in (*main, *(replace(one, group="layers") for one in maps)):
        content, hint = panel.content, _hint(history, panel)
        titles = dict.fromkeys(panel.names, panel.title) | titles
        if isinstance(content, Lines):
            found.append(_lines_card(panel, repeat([history[name] for name in panel.names]), hint))
            shown |= {*panel.names} if panel in main else set()
        elif isinstance(content, Shapes) and content.over_steps is not None:
            found.append(Card(replace(panel, content=content.over_steps), hint))
        elif not isinstance(content, (Drawn, Grid)):
            found.append(Card(panel, hint))
        if isinstance(content, (Lines, Map)) and content.beside is not None:
            title = f"{panel.title}: {content.beside.title}"
            found.append(Card(replace(panel, title=title, content=content.beside), hint))
    for one in history.scalars():
        if one.series not in shown | {EPOCHS}:
            title = titles.get(one.series, one.view.title or one.series)
            found.append(_alone(history, one, title))
    return found


def _alone(history: History, one: Scalar, title: str) -> Card:
    """A number of the summary that no panel has."""
    shown = Lines(
        (Curve(one.name, one.line),),
        scale=value_scale(one.view.yscale, [one.line.values]),
        words=WORDS.get(one.part, ""),
    )
    heading = f"{title}: {one.part}" if one.part else title
    panel = Panel(heading, one.view.group, (one.series,), shown)
    return _lines_card(panel, [(history[one.series],)])


def _lines_card(panel: Panel, records: Iterable[Sequence[Series]], hint: str = "") -> Card:
    """The card of some lines; ``records`` are those that each curve was made of."""
    assert isinstance(panel.content, Lines)
    found = zip(panel.content.all_curves, records, strict=False)
    return Card(panel, hint, tuple(gaps(curve.line, series) for curve, series in found))


def _hint(history: History, panel: Panel) -> str:
    name = panel.names[0]
    kinds = history.sources.get(name, Source()).kinds
    return next((HINTS[kind] for kind in (*kinds, name) if kind in HINTS), "")


# Several runs -------------------------------------------------------------------------------


def _of_several(runs: Mapping[str, History]) -> list[Card]:
    """A card for each number that a run has, with a line for each run."""
    colors = run_colors([*runs])
    found: list[Card] = []
    for one in numbers(runs):
        unit = UNITS.get(one.part, UNITS.get(one.view.label, ""))
        words = one.name if one.name.endswith(one.words) else f"{one.name} · {one.words}"
        shown = lines_of(one, colors)
        curves = tuple(replace(curve, unit=unit) for curve in shown.curves)
        shown = replace(shown, curves=curves, words=words)
        records = [(runs[run][one.series],) for run in one.lines]
        hint = next((HINTS[kind] for kind in one.kinds if kind in HINTS), "")
        panel = Panel(one.title, one.view.group, (one.name,), shown)
        found.append(_lines_card(panel, records, hint))
    return found
