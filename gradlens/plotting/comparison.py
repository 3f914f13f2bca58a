"""Several runs in one figure: each number per step as a line for every run."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, ClassVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradlens.history.history import History
from gradlens.history.lines import Line, line
from gradlens.history.records import Source
from gradlens.history.scalars import Scalar
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.instruments import BUILT_IN
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Artists, Curve, Drawn, Lines
from gradlens.instruments.scales import StepAxis, number_label, value_scale
from gradlens.instruments.style import (
    INK,
    MUTED,
    PAPER,
    RGB,
    TEXT_SIZE,
    categorical_colors,
    sequence_colors,
    shorten,
    size_in_points,
    text_width,
)
from gradlens.plotting.panels import EPOCHS, GROUPS, Panel, limited
from gradlens.plotting.rendering import draw

SPIKY = ("Alpha", "GradNoiseScale")
"""Kinds with single values so far off that an axis which has room for them shows nothing else."""

ROWS = 7
"""Runs in one column of their list."""


@dataclass(frozen=True)
class Number:
    """One number per step of several runs, with its line by the name of the run."""

    name: str
    series: str
    title: str
    part: str
    words: str
    kinds: tuple[str, ...]
    view: View
    lines: Mapping[str, Line]


def compare(runs: Mapping[str, History], title: str = "", log_steps: bool = False) -> Figure:
    """A figure with a panel for each number per step, and a colour for each run by its name.

    Numbers are those of ``scalars``; what has none, such as histograms, is left out. ``ValueError``
    if nothing remains.
    """
    found = numbers(runs)
    if not found:
        raise ValueError(f"none of the runs has numbers to compare: {', '.join(runs)}")
    history = History()
    colors = run_colors([*runs])
    panels = [_panel(history, number, colors) for number in found]
    panels.sort(key=lambda panel: GROUPS.index(panel.group))
    figure = Figure(facecolor=PAPER)
    shown = limited((_list_of_runs(history, found, colors), *panels))
    draw(figure, history, shown, title, log_steps)
    return figure


def numbers(runs: Mapping[str, History]) -> tuple[Number, ...]:
    """Every number per step that at least one run has, in the order of the runs."""
    by_run = {run: {one.name: one for one in history.scalars()} for run, history in runs.items()}
    known = {name: one for found in reversed(by_run.values()) for name, one in found.items()}
    names = dict.fromkeys(name for found in by_run.values() for name in found)
    shown = [known[name] for name in names if known[name].series != EPOCHS]
    titles = Counter((one.view.title, one.part) for one in shown)
    return tuple(
        Number(
            one.name,
            one.series,
            # Of two quantities of one class, the names tell them apart.
            _titled(_title(one) if titles[one.view.title, one.part] == 1 else one.series, one),
            one.part,
            _words(one),
            one.kinds,
            one.view,
            {run: found[one.name].line for run, found in by_run.items() if one.name in found},
        )
        for one in shown
    )


def _title(one: Scalar) -> str:
    """The title of the panel that a run's own figure has for a number."""
    if one.kinds:
        return one.view.title
    titles = (each.title_of_logged(one.series) for each in BUILT_IN if one.series in each.logged)
    return next(titles, one.view.title)


def _titled(title: str, one: Scalar) -> str:
    """The title of the panel of one part of a record, as on the page of one run."""
    return f"{title}: {one.part}" if one.part and not _is_unit(one) else title


def _words(one: Scalar) -> str:
    """What the numbers are, where the title doesn't say it."""
    return one.part if _is_unit(one) else "" if one.part else one.view.label


def _is_unit(one: Scalar) -> bool:
    """Whether the part of a record is not a part, but the unit of times."""
    return "Time" in one.kinds


def left_out(runs: Mapping[str, History]) -> tuple[str, ...]:
    """Series whose records have no single number for each step."""
    shown = {one.series for history in runs.values() for one in history.scalars()}
    names = (name for history in runs.values() for name in history.names if history[name])
    return tuple(dict.fromkeys(name for name in names if name not in shown))


# Colours and names of runs ------------------------------------------------------------------


def run_colors(runs: Sequence[str]) -> dict[str, RGB]:
    """The colour of each run: from dark to light where they are ordered by a value in their names.

    Six runs or fewer without an order have colours that differ most.
    """
    values = ordered_values(runs)
    if values is None:
        return dict(zip(runs, categorical_colors(len(runs)), strict=True))
    ascending = sorted(runs, key=values.__getitem__)
    by_run = dict(zip(ascending, sequence_colors(len(runs)), strict=True))
    return {run: by_run[run] for run in runs}


def ordered_values(runs: Sequence[str]) -> dict[str, float] | None:
    """The one number in which the names of three runs or more differ, such as a learning rate.

    ``None`` if they differ in more, or if the number only counts runs.
    """
    pieces = [NUMBER.split(run) for run in runs]
    if len(runs) < 3 or len({len(each) for each in pieces}) > 1:
        return None
    differing = [place for place, each in enumerate(zip(*pieces, strict=True)) if len({*each}) > 1]
    if len(differing) != 1 or differing[0] % 2 == 0:
        return None
    before = pieces[0][differing[0] - 1].lower().rstrip("=_-: ")
    if before.endswith(COUNTING) or not before:
        return None
    return {run: float(each[differing[0]]) for run, each in zip(runs, pieces, strict=True)}


NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
COUNTING = ("run", "seed", "trial", "try", "version", "v", "copy")
"""What is in front of a number that counts runs."""


def short_run_names(runs: Sequence[str]) -> dict[str, str]:
    """The names without the beginning and the end that all of them share, cut between words."""
    if len(runs) < 2:
        return {run: run for run in runs}
    words = [re.split(r"(?<=[=_/ ])", run) for run in runs]
    common = sum(1 for _ in takewhile(lambda each: len({*each}) == 1, zip(*words, strict=False)))
    return {run: "".join(each[common:]) or run for run, each in zip(runs, words, strict=True)}


# Panels -------------------------------------------------------------------------------------


def _panel(history: History, number: Number, colors: Mapping[str, RGB]) -> Panel:
    """The panel of a number, whose lines become series of ``history``."""
    names = []
    for run, one in number.lines.items():
        names.append(f"{number.name} of {run}")
        history.sources[names[-1]] = Source((), replace(number.view, title=number.title))
        gap = Undefined(one.reason) if one.reason else math.nan
        for step, value in zip(one.steps.tolist(), one.values.tolist(), strict=True):
            history.append(int(step), {names[-1]: gap if math.isnan(value) else value})
    shades = tuple(colors[run] for run in number.lines)
    spiky = any(kind in SPIKY for kind in number.kinds)
    short = short_run_names([*colors])
    labels = tuple(short[run] for run in number.lines)
    instrument = RunsInstrument(tuple(names), shades, labels, number.words, spiky)
    return Panel(instrument, number.view.group)


@dataclass(frozen=True)
class RunsInstrument(Instrument):
    """One line for each run, with its name on the right."""

    colors: tuple[RGB, ...] = ()
    labels: tuple[str, ...] = ()
    words: str = ""
    spiky: bool = False

    def content(self, history: History) -> Lines:
        lines = [line(history[name]) for name in self.names]
        named = zip(self.labels, lines, self.colors, strict=True)
        return Lines(
            tuple(Curve(name, one, color, width=1.4) for name, one, color in named),
            scale=value_scale(self.view(history).yscale, [one.values for one in lines]),
            latest=("", False),
            words=self.words,
            spiky=self.spiky,
            named_at_ends=True,
        )


def _list_of_runs(history: History, found: Sequence[Number], colors: Mapping[str, RGB]) -> Panel:
    losses = next((number.lines for number in found if "Loss" in number.kinds), {})
    column = "last loss" if losses else ""
    values = {run: number_label(losses[run].latest) if run in losses else "" for run in colors}
    order = ordered_values([*colors]) or dict.fromkeys(colors, 0.0)
    entries = tuple(
        (run, colors[run], values[run]) for run in sorted(colors, key=order.__getitem__)
    )
    width = float(math.ceil(len(entries) / ROWS))
    instrument = RunListInstrument(history.names[:1], entries, column)
    return Panel(instrument, "performance", width)


@dataclass(frozen=True)
class RunListInstrument(Instrument):
    """The key of a comparison: each run's colour and name, and a value for each."""

    entries: tuple[tuple[str, RGB, str], ...] = ()
    column: str = ""

    title: ClassVar[str] = "Runs"

    def content(self, history: History) -> Drawn:
        return Drawn(self._draw, (self.column, False))

    def _draw(self, ax: Axes, axis: StepAxis) -> Artists:
        ax.set_axis_off()
        columns = math.ceil(len(self.entries) / ROWS)
        artists: Artists = {}
        for place, entry in enumerate(self.entries):
            column, row = divmod(place, ROWS)
            artists |= _entry(ax, entry, column / columns, 1 / columns, 1 - (row + 0.2) / ROWS)
        return artists


def _entry(
    ax: Axes, entry: tuple[str, RGB, str], left: float, width: float, height: float
) -> Artists:
    """A swatch, a name, and a value on the right, in fractions of the axis."""
    run, color, value = entry
    across = size_in_points(ax)[0]
    swatch, gap = 14 / across, 6 / across
    right = left + width - (0 if left + width >= 0.999 else 3 * gap)
    room = (right - left - swatch - 2 * gap) * across - text_width(value, TEXT_SIZE)
    place: dict[str, Any] = {"transform": ax.transAxes, "fontsize": TEXT_SIZE, "va": "center"}
    ends = [left, left + swatch]
    (mark,) = ax.plot(ends, [height] * 2, color=color, linewidth=2, transform=ax.transAxes)
    name = ax.text(left + swatch + gap, height, shorten(run, room, TEXT_SIZE), color=INK, **place)
    number = ax.text(right, height, value, color=MUTED, ha="right", **place)
    return {f"{run} mark": mark, run: name, f"{run} value": number}
