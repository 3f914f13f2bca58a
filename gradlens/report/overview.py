"""What a page says about its runs besides the figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradlens.history.coverage import CoverageTable
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.history.records import Note
from gradlens.instruments.scales import number_label
from gradlens.instruments.style import Color
from gradlens.plotting.comparison import Number, numbers

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
