"""Several runs in one figure: each number per step as a line for every run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from gradlens.history.history import History
from gradlens.history.lines import Line
from gradlens.history.scalars import Scalar
from gradlens.instruments import BUILT_IN
from gradlens.instruments.axes import TextFigure
from gradlens.instruments.panel import Curve, Lines, Panel
from gradlens.instruments.scales import StepAxis, number_label, value_scale
from gradlens.instruments.steps import range_of_alpha
from gradlens.instruments.style import (
    RGB,
    Color,
    Entry,
    categorical_colors,
    common,
    sequence_colors,
)
from gradlens.plotting.layout import FigureSize, Look, columns
from gradlens.plotting.rendering import Words, draw
from gradlens.plotting.screen import EPOCHS, GROUPS, limited, named

SPIKY = ("Alpha", "GradNoiseScale")
"""Kinds with single values so far off that an axis which has room for them shows nothing else."""


UNITS = {"s/step": "s/step", "samples": "samples", "batch size": "samples"}
"""Units by the part of a series, or by the label of its view; other numbers have none."""


@dataclass(frozen=True)
class Number:
    """One number per step of several runs, with its line by the name of the run."""

    scalar: Scalar
    title: str
    lines: Mapping[str, Line]

    @property
    def words(self) -> str:
        """What the numbers are, where the title doesn't say it."""
        one = self.scalar
        # That of times is a unit.
        return one.part if "Time" in one.kinds else "" if one.part else one.view.label

    def panel(
        self, names: Mapping[str, str], colors: Mapping[str, Color], words: str = ""
    ) -> Panel:
        """Its panel: a line for each run, in its colour and called by its shown name."""
        view, kinds = self.scalar.view, self.scalar.kinds
        unit = UNITS.get(self.scalar.part, UNITS.get(view.label, ""))
        values = [one.values for one in self.lines.values()]
        found = np.concatenate([one[np.isfinite(one)] for one in values])
        content = Lines(
            tuple(
                Curve(names[run], one, colors[run], 1.4, unit=unit)
                for run, one in self.lines.items()
            ),
            scale=value_scale(view.yscale, values),
            words=words or self.words,
            spiky=any(kind in SPIKY for kind in kinds),
            limits=range_of_alpha(found) if "Alpha" in kinds else None,
            named_at_ends=True,
        )
        series = (self.scalar.name, self.scalar.series)
        return Panel(self.title, view.group, series, content, view.label or self.title)


def compare(
    runs: Mapping[str, History],
    title: str = "",
    log_steps: bool = False,
    names: Sequence[str] = (),
    look: Look = "screen",
    size: FigureSize = None,
    colors: Sequence[Color] = (),
    figure: Figure | None = None,
) -> Figure:
    """A figure with a panel for each number per step, and a colour for each run by its name.

    Numbers are those of ``scalars``; what has none, such as histograms, is left out. ``names``
    chooses panels by title, and ``colors`` are those of the runs in their order. It is drawn on a
    new figure, or on ``figure``, which is emptied first. ``ValueError`` if nothing remains.
    """
    found = numbers(runs)
    if not found:
        raise ValueError(f"none of the runs has numbers to compare: {', '.join(runs)}")
    if colors and len(colors) != len(runs):
        raise ValueError(f"there are {len(colors)} colours for {len(runs)} runs")
    chosen = dict(zip(runs, map(to_rgb, colors), strict=False))
    by_run = chosen or run_colors([*runs])
    short = short_run_names([*runs])
    panels = [number.panel(short, by_run) for number in found]
    panels.sort(key=lambda panel: GROUPS.index(panel.group))
    shown = limited(tuple(panels))
    if names:
        shown = named(names, [(panel.title, panel.names, panel) for panel in panels])
    steps = np.unique(np.concatenate([one.steps for each in found for one in each.lines.values()]))
    facts = (f"last step {steps[-1]:,.0f}", f"{steps.size:,} recorded steps")
    words = Words(title, facts, legend=_legend(found, by_run))
    axis = StepAxis(steps[0], steps[-1], log_steps)
    figure = TextFigure() if figure is None else figure
    draw(figure, shown, words, axis, widest=columns(size), look=look, size=size)
    return figure


def numbers(runs: Mapping[str, History]) -> tuple[Number, ...]:
    """Every number per step that at least one run has, in the order of the runs."""
    by_run = {run: {one.name: one for one in history.scalars()} for run, history in runs.items()}
    known = {name: one for found in reversed(by_run.values()) for name, one in found.items()}
    names = dict.fromkeys(name for found in by_run.values() for name in found)
    shown = [known[name] for name in names if known[name].series != EPOCHS]
    logged = {name: one.title_of_logged(name) for one in reversed(BUILT_IN) for name in one.logged}
    titles = Counter((one.view.title, one.part) for one in shown)
    result = []
    for one in shown:
        # Of two quantities of one class, the names tell them apart.
        own = one.view.title if one.kinds else logged.get(one.series, one.view.title)
        title = own if titles[one.view.title, one.part] == 1 else one.series
        part = f": {one.part}" if one.part and "Time" not in one.kinds else ""
        lines = {run: found[one.name].line for run, found in by_run.items() if one.name in found}
        result.append(Number(one, f"{title}{part}", lines))
    return tuple(result)


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
    count = common(words)
    return {run: "".join(each[count:]) or run for run, each in zip(runs, words, strict=True)}


ENDINGS = {".jsonl", ".json"}


def run_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """A name for each path, without the folders and the ending that all have in common.

    ``ValueError`` if a path is given twice.
    """
    whole = [path.absolute() for path in paths]
    twice = [path for place, path in enumerate(paths) if whole[place] in whole[:place]]
    if twice:
        raise ValueError(f"{twice[0]} is given twice")
    endings = {path.suffix for path in paths}
    plain = len(endings) == 1 and endings <= ENDINGS
    parts = [path.with_suffix("").parts if plain else path.parts for path in whole]
    # At least one part of each path remains.
    start = common([one[:-1] for one in parts])
    parts = [one[start:] for one in parts]
    end = common([one[:0:-1] for one in parts])
    return tuple("/".join(one[: len(one) - end]) for one in parts)


def _legend(found: Sequence[Number], colors: Mapping[str, RGB]) -> tuple[Entry, ...]:
    """Each run's colour, name and last loss, in the order of the values in their names."""
    losses = next((number.lines for number in found if "Loss" in number.scalar.kinds), {})
    order = ordered_values([*colors]) or dict.fromkeys(colors, 0.0)
    return tuple(
        Entry(
            f"{run} (last loss {number_label(losses[run].latest)})" if run in losses else run,
            colors[run],
        )
        for run in sorted(colors, key=order.__getitem__)
    )
