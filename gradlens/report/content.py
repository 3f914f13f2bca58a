"""From histories to the cards of a page: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from gradlens.history.history import History
from gradlens.history.records import Source
from gradlens.history.scalars import Scalar
from gradlens.history.series import Series
from gradlens.history.view import Group
from gradlens.instruments import Curve, Instrument, LayerMapInstrument, Lines, Map
from gradlens.instruments.maps import GREY
from gradlens.instruments.panel import all_curves
from gradlens.instruments.scales import value_scale
from gradlens.instruments.style import DOT
from gradlens.plotting.comparison import SPIKY, numbers, run_colors
from gradlens.plotting.panels import EPOCHS, GROUPS, Panel, all_main_panels
from gradlens.report.cards import Card, LinesCard, MapCard
from gradlens.report.gaps import gaps
from gradlens.report.hints import HINTS
from gradlens.report.pictures import PICTURES

UNITS = {
    "s/step": "s/step",
    "samples": "samples",
    "batch size": "samples",
}
"""Units by the part of a series, or by the label of its view; other numbers have none."""

WORDS = {"clipped": "share of elements out of range"}
"""What the part of a series is."""


def cards(runs: Mapping[str, History]) -> tuple[Card, ...]:
    """The cards of a page, group by group: those of one run, or of a comparison."""
    found = _of_one(*runs.values()) if len(runs) == 1 else _of_several(runs)
    return tuple(sorted(found, key=lambda card: GROUPS.index(card.group)))


# One run ------------------------------------------------------------------------------------


def _of_one(history: History) -> list[Card]:
    """The panels of a figure, numbers of what has no lines among them, and maps of layers."""
    maps = [Panel(one, "layers") for one in LayerMapInstrument().panels(history)]
    main = all_main_panels(history)
    found: list[Card] = []
    titles: dict[str, str] = {}
    shown: set[str] = set()
    for panel in (*main, *maps):
        instrument = panel.instrument
        title, content = instrument.heading(history), instrument.content(history)
        titles = dict.fromkeys(instrument.names, title) | titles
        if isinstance(content, Map):
            words = content.words + (f"{DOT}{GREY}" if content.has_grey else "")
            found.append(MapCard(title, panel.group, words, content))
        elif isinstance(content, Lines):
            records = repeat([history[name] for name in instrument.names])
            hint = _hint(history, instrument)
            found.append(_lines_card(title, panel.group, content, records, hint))
            shown |= {*instrument.names} if panel in main else set()
        else:
            pictures = PICTURES.get(type(instrument))
            found += pictures(history, instrument) if pictures is not None else []
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
    return _lines_card(heading, one.view.group, shown, [(history[one.series],)])


def _lines_card(
    title: str,
    group: Group,
    shown: Lines,
    records: Iterable[Sequence[Series]],
    hint: str = "",
) -> LinesCard:
    """The card of some lines; ``records`` are those that each curve was made of."""
    found = zip(all_curves(shown), records, strict=False)
    missing = tuple(gaps(curve.line, series) for curve, series in found)
    return LinesCard(title, group, shown.words, shown, missing, hint)


def _hint(history: History, instrument: Instrument) -> str:
    name = instrument.names[0]
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
        shown = Lines(
            tuple(Curve(run, line, colors[run], unit=unit) for run, line in one.lines.items()),
            scale=value_scale(one.view.yscale, [line.values for line in one.lines.values()]),
            words=words,
            spiky=any(kind in SPIKY for kind in one.kinds),
        )
        records = [(runs[run][one.series],) for run in one.lines]
        hint = next((HINTS[kind] for kind in one.kinds if kind in HINTS), "")
        found.append(_lines_card(one.title, one.view.group, shown, records, hint))
    return found
