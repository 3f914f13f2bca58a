"""From histories to the cards of a page: pure functions."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line
from gradlens.history.series import Series
from gradlens.history.undefined import Undefined
from gradlens.instruments import BUILT_IN, Instrument, LayerMapInstrument
from gradlens.instruments.axes import plot_panels
from gradlens.instruments.instrument import step_axis
from gradlens.instruments.panel import Drawn, Grid, Lines, Map, Panel, Shapes
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.shapes import GREY
from gradlens.instruments.style import BLUE, DOT, Color
from gradlens.plotting.comparison import Number, numbers, run_colors
from gradlens.plotting.rendering import cannot_be_drawn
from gradlens.plotting.screen import EPOCHS, GROUPS, main_parts, panels

MOST = 1000
"""Largest number of missing values of a series that a page has, evenly over all of them."""

INFINITE = "infinite"
UNKNOWN = "not a number"


Gaps = Mapping[float, str]
"""Why there is no finite number, by the steps where there is none."""


def gaps(line: Line, records: Sequence[Series]) -> Gaps:
    """The missing values of a line that was made of the records of some series."""
    places = np.flatnonzero(~np.isfinite(line.values))
    if places.size > MOST:
        places = places[np.linspace(0, places.size - 1, MOST).astype(np.int64)]
    # Where no record has a reason, that of the line is the instrument's own.
    own = UNKNOWN if any(series.reason for series in records) else line.reason or UNKNOWN
    found = {}
    for step, value in zip(line.steps[places].tolist(), line.values[places], strict=True):
        reasons = filter(None, (reason(series.get(int(step))) for series in records))
        found[step] = INFINITE if np.isinf(value) else next(reasons, own)
    return found


def reason(value: Any) -> str:
    """Why a record has no number: its own reason, or that of the first of its entries with one."""
    if isinstance(value, Undefined):
        return value.reason
    if isinstance(value, Mapping):
        return next(filter(None, map(reason, value.values())), str(value.get("reason") or ""))
    return ""


WORDS = {"clipped": "share of elements out of range"}
"""What the part of a series is."""


@dataclass(frozen=True, eq=False)
class Card:
    """A panel of a page, the gaps of its curves, or all of it as a PNG."""

    panel: Panel
    gaps: tuple[Gaps, ...] = ()
    picture: str = ""

    @property
    def words(self) -> str:
        shown = self.panel.content
        if isinstance(shown, (Drawn, Grid)):
            return ""
        return shown.words + f"{DOT}{GREY}" * (isinstance(shown, Map) and shown.has_grey)

    @property
    def why(self) -> str:
        shown = self.panel.content
        return shown.why if isinstance(shown, Lines) else ""

    @property
    def entries(self) -> list[tuple[str, Color]]:
        """What its key explains, and the colours of that."""
        match self.panel.content:
            case Lines() as lines:
                return [(curve.name, curve.color) for curve in lines.all_curves]
            case Shapes() as shapes:
                return [(entry.label, entry.color) for entry in shapes.key]
            case _:
                return []


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
    at all steps. What only matplotlib draws is a picture.
    """
    main = panels(main_parts(history, instruments), history)
    maps = panels(LayerMapInstrument().parts(history), history)
    found: list[Card] = []
    titles: dict[str, str] = {}
    shown: set[str] = set()
    for panel in (*main, *(replace(one, group="layers") for one in maps)):
        content = panel.content
        titles = dict.fromkeys(panel.names, panel.title) | titles
        if isinstance(content, Lines):
            found.append(_lines_card(panel, repeat([history[name] for name in panel.names])))
            shown |= {*panel.names} if panel in main else set()
        elif isinstance(content, Shapes) and content.over_steps is not None:
            found.append(Card(replace(panel, content=content.over_steps)))
        elif isinstance(content, (Drawn, Grid)):
            found.append(_picture(panel, step_axis(history)))
        else:
            found.append(Card(panel))
        if isinstance(content, (Lines, Map)) and content.beside is not None:
            title = f"{panel.title}: {content.beside.title}"
            found.append(Card(replace(panel, title=title, content=content.beside)))
    for one in history.scalars():
        if one.series not in shown | {EPOCHS}:
            title = titles.get(one.series, one.view.title or one.series)
            number = Number(one, f"{title}: {one.part}" if one.part else title, {"": one.line})
            panel = number.panel({"": one.name}, {"": BLUE}, WORDS.get(one.part, ""))
            found.append(_lines_card(panel, [(history[one.series],)]))
    return found


def _picture(panel: Panel, axis: StepAxis) -> Card:
    """The card of what only matplotlib draws, or of why that fails."""
    written = io.BytesIO()
    try:
        figure = plot_panels([replace(panel, title="")], axis).figure
        figure.savefig(written, format="png", dpi=200)
    except Exception as error:
        return Card(replace(panel, content=cannot_be_drawn(panel.names, error)))
    png = base64.b64encode(written.getvalue()).decode()
    return Card(panel, picture=f"data:image/png;base64,{png}")


def _lines_card(panel: Panel, records: Iterable[Sequence[Series]]) -> Card:
    """The card of some lines; ``records`` are those that each curve was made of."""
    assert isinstance(panel.content, Lines)
    found = zip(panel.content.all_curves, records, strict=False)
    return Card(panel, tuple(gaps(curve.line, series) for curve, series in found))


# Several runs -------------------------------------------------------------------------------


def _of_several(runs: Mapping[str, History]) -> list[Card]:
    """A card for each number that a run has, with a line for each run."""
    colors = run_colors([*runs])
    found: list[Card] = []
    for one in numbers(runs):
        name = one.scalar.name
        words = name if name.endswith(one.words) else f"{name} · {one.words}"
        panel = one.panel({run: run for run in runs}, colors, words)
        records = [(runs[run][one.scalar.series],) for run in one.lines]
        found.append(_lines_card(panel, records))
    return found
