"""Several runs in one figure: each number per step as a line for every run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradlens.history.history import History
from gradlens.history.lines import Floats, Line, line
from gradlens.history.records import Source
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.instruments.drawing import (
    SMOOTH_FROM,
    Artists,
    any_finite,
    explain_empty,
    missing,
    thread,
)
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import (
    Scale,
    StepAxis,
    fit,
    log_if_far,
    log_if_wide,
    number_label,
    without_spikes,
)
from gradlens.instruments.series import trend
from gradlens.instruments.style import (
    INK,
    MUTED,
    PAPER,
    RGB,
    TEXT_SIZE,
    categorical_colors,
    shorten,
    size_in_points,
    subtitle,
    text_width,
    tint,
    title,
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
    title: str
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
    colors = dict(zip(runs, categorical_colors(len(runs)), strict=True))
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
            # Of two quantities of one class, the names tell them apart.
            one.view.title if titles[one.view.title, one.part] == 1 else one.series,
            one.part or one.view.label,
            one.kinds,
            one.view,
            {run: found[one.name].line for run, found in by_run.items() if one.name in found},
        )
        for one in shown
    )


def left_out(runs: Mapping[str, History]) -> tuple[str, ...]:
    """Series whose records have no single number for each step."""
    shown = {one.series for history in runs.values() for one in history.scalars()}
    names = (name for history in runs.values() for name in history.names if history[name])
    return tuple(dict.fromkeys(name for name in names if name not in shown))


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
    instrument = RunsInstrument(tuple(names), shades, number.words, spiky)
    return Panel(instrument, number.view.group)


@dataclass(frozen=True)
class RunsInstrument(Instrument):
    """One line for each run; raw values are pale behind their trend."""

    colors: tuple[RGB, ...] = ()
    words: str = ""
    spiky: bool = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        lines = {name: line(history[name]) for name in self.names}
        axis.apply(ax)
        if not any_finite(list(lines.values())):
            return explain_empty(ax, list(lines.values()))
        artists: Artists = {}
        for (name, one), color in zip(lines.items(), self.colors, strict=True):
            artists |= _curve(ax, axis, one, color, name)
        view = history.sources[self.names[0]].view
        self._fit(ax, [one.values for one in lines.values()], view.yscale)
        artists["subtitle"] = subtitle(ax, self.words)
        return artists | missing(ax, axis, list(lines.values()))

    def _fit(self, ax: Axes, values: list[Floats], wish: Scale) -> None:
        scale = {"log": "log", "symlog": log_if_far(values)}.get(wish, log_if_wide(values))
        if self.spiky:
            values = [without_spikes(one, scale == "log") for one in values]
        fit(ax, values, scale)


def _curve(ax: Axes, axis: StepAxis, one: Line, color: RGB, name: str) -> Artists:
    """As ``curve``, but in front of the pale values of all runs, and across short gaps."""
    if one.finite.sum() < SMOOTH_FROM:
        return {name: thread(ax, axis, one, color, 1.4, 3)}
    smooth = trend(one, axis.warp, bridge=True)
    return {
        name: thread(ax, axis, one, tint(color, 0.3), 0.6, 2),
        f"{name} trend": thread(ax, axis, smooth, color, 1.4, 3),
    }


def _list_of_runs(history: History, found: Sequence[Number], colors: Mapping[str, RGB]) -> Panel:
    losses = next((number.lines for number in found if "Loss" in number.kinds), {})
    column = "last loss" if losses else ""
    values = {run: number_label(losses[run].latest) if run in losses else "" for run in colors}
    entries = tuple((run, color, values[run]) for run, color in colors.items())
    width = float(math.ceil(len(entries) / ROWS))
    instrument = RunListInstrument(history.names[:1], entries, column)
    return Panel(instrument, "performance", width)


@dataclass(frozen=True)
class RunListInstrument(Instrument):
    """The key of a comparison: each run's colour and name, and a value for each."""

    entries: tuple[tuple[str, RGB, str], ...] = ()
    column: str = ""

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        title(ax, "Runs", self.column)
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
    points = size_in_points(ax)[0]
    swatch, gap = 14 / points, 6 / points
    right = left + width - (0 if left + width >= 0.999 else 3 * gap)
    room = (right - left - swatch - 2 * gap) * points - text_width(value, TEXT_SIZE)
    place: dict[str, Any] = {"transform": ax.transAxes, "fontsize": TEXT_SIZE, "va": "center"}
    ends = [left, left + swatch]
    (mark,) = ax.plot(ends, [height] * 2, color=color, linewidth=2, transform=ax.transAxes)
    name = ax.text(left + swatch + gap, height, shorten(run, room, TEXT_SIZE), color=INK, **place)
    number = ax.text(right, height, value, color=MUTED, ha="right", **place)
    return {f"{run} mark": mark, run: name, f"{run} value": number}
