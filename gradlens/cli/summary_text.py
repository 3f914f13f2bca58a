"""A summary as lines of text for a terminal, and as JSON and CSV for other programs."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gradlens.cli.text import as_line, printable, strict, wrapped
from gradlens.history.coverage import CoverageTable, few
from gradlens.history.finding import Finding
from gradlens.history.lines import Line
from gradlens.history.records import Note, Spending
from gradlens.instruments.scales import number_label
from gradlens.plotting.summary import DeadUnits, Extreme, NoiseRanking, Row, Summary

HEADINGS = ("last", "change", "min", "step", "max", "step", "steps")
GAPS = tuple(" " if heading == "step" else "  " for heading in HEADINGS)
"""What is left of each column: a step belongs to the value before it."""
TREND_GAP = "  "
SPARK = (6, 48)
"""Fewest and most characters of a trend; it is left out where there is room for fewer."""
CHOICES = ((0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4, 5), (0, 1, 2, 4), (0, 1), (0,))
"""Columns to show, of ``HEADINGS``: the first of these that leave room for whole names and a trend.
Where none do, it is the last value alone."""
FLAT = 0.005
"""Relative change below which a series counts as constant."""
FINDINGS = 8
"""So many findings are shown."""
NOISIEST = 5
"""So many of the noisiest layers are shown."""
MOST_UNITS = 24
"""So many of a layer's dead units are shown."""
NOTES = 20
"""So many of the latest notes are shown."""

LEVELS, PLAIN_LEVELS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
PLAIN = {"−": "-", "×": "x", "∞": "inf", "…": "~", "λ": "lambda", "↗": "/", "↘": "\\", "→": "="}
"""ASCII for the signs of a summary."""


def render(summary: Summary, width: int = 80, title: str = "", plain: bool = False) -> str:
    """A summary as lines of at most ``width`` characters, if these are 20 or more.

    ``plain`` uses nothing but ASCII.
    """
    page = _Page(width, plain)
    sections = (
        page.wrapped(f"{title}: {_extent(summary)}" if title else _extent(summary)),
        page.findings(summary.findings, title or "RUN"),
        page.table(summary.rows),
        page.wrapped(
            _series_without("single numbers", [n for n, count in summary.others if count])
        ),
        page.wrapped(_series_without("records", [n for n, count in summary.others if not count])),
        *map(page.noise, summary.noise),
        page.dead_units(summary.dead_units),
        page.coverage(summary.coverage),
        page.spending(summary.spending),
        page.notes(summary.notes),
    )
    return "\n\n".join("\n".join(section) for section in sections if section)


def sparkline(line: Line, width: int, log: bool = False, levels: str = LEVELS) -> str:
    """A line in ``width`` characters: the median of each part of its steps, blank without any.

    There are no more parts than records. ``log`` has an effect on positive values only.
    """
    width = min(width, line.steps.size)
    steps, values = line.steps[line.finite], line.values[line.finite]
    if not values.size:
        return " " * width
    values = np.log(values) if log and values.min() > 0 else values / (np.abs(values).max() or 1)
    places = (steps - line.steps[0]) / max(line.steps[-1] - line.steps[0], 1) * (width - 1)
    columns = places.round().astype(np.int64)
    medians = {int(n): float(np.median(values[columns == n])) for n in np.unique(columns)}
    low, high = min(medians.values()), max(medians.values())
    top = (len(levels) - 1) / (high - low) if high > low else 0.0
    signs = {n: levels[round((median - low) * top)] for n, median in medians.items()}
    return "".join(signs.get(n, " ") for n in range(width))


@dataclass(frozen=True)
class _Page:
    width: int
    plain: bool

    def text(self, text: str) -> str:
        """One line without the control characters that a terminal would obey."""
        shown = printable(" ".join(text.split()))
        if not self.plain:
            return shown
        for sign, substitute in PLAIN.items():
            shown = shown.replace(sign, substitute)
        return shown.encode("ascii", "replace").decode("ascii")

    def wrapped(self, text: str, indent: str = "") -> list[str]:
        return wrapped(self.text(text), self.width, indent)

    def findings(self, findings: Sequence[Finding], run: str) -> list[str]:
        if not findings:
            return []
        certainly = "is" if any(finding.is_alarm for finding in findings) else "may be"
        lines = self.wrapped(f"what {certainly} wrong (gradlens diagnose {run} says more)")
        for finding in findings[:FINDINGS]:
            indent = "    " if finding.explained_by else "  "
            notice = "" if finding.is_alarm else "notice, "
            lines += self.wrapped(f"{notice}step {finding.step}: {finding.headline}", indent)
        more = len(findings) - FINDINGS
        return [*lines, *(self.wrapped(f"and {more} more", "  ") if more > 0 else ())]

    def table(self, rows: Sequence[Row]) -> list[str]:
        if not rows:
            return []
        names = [self.text(row.scalar.name) for row in rows]
        cells = [HEADINGS, *(tuple(map(self.text, _cells(row))) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        longest = max(len("series"), *map(len, names))
        shown = next((c for c in CHOICES if self._room(c, widths) >= longest + SPARK[0]), (0,))
        room = self._room(shown, widths)
        name = min(room + len(TREND_GAP), longest)
        spark = min(room - name, SPARK[1]) if room - name >= SPARK[0] else 0
        trends = ["trend", *(self._sparkline(row, spark) for row in rows)]
        lines = []
        notes = ["", *(_undefined(row) for row in rows)]
        for head, trend, line, note in zip(("series", *names), trends, cells, notes, strict=True):
            # A name that is too long for the table has lines of its own.
            is_short = len(head) <= name
            lines += [] if is_short else wrapped(head, self.width)
            values = [(line[column], widths[column], GAPS[column]) for column in shown]
            lines.append(
                _line((head if is_short else "").ljust(name), trend.ljust(spark)[:spark], values)
            )
            lines += self.wrapped(note, "    ")
        return lines

    def _room(self, columns: Sequence[int], widths: Sequence[int]) -> int:
        """Characters for name and trend beside some columns."""
        taken = sum(widths[column] + len(GAPS[column]) for column in columns)
        return self.width - taken - len(TREND_GAP)

    def noise(self, ranking: NoiseRanking) -> list[str]:
        """The noisiest layers, and those without a number."""
        known = [one for one in ranking.layers if not math.isnan(one.median)]
        unknown: dict[str, list[str]] = {}
        for one in ranking.layers[len(known) :]:
            unknown.setdefault(one.reason, []).append(one.name)
        what = ranking.label if ranking.large_is_noisy else f"{ranking.label}; small is noisy"
        of = f"noisiest of {len(ranking.layers)} {ranking.noun}s by {ranking.series}"
        rows = [(one.name, shown(one.last), shown(one.median)) for one in known[:NOISIEST]]
        gaps = [f"no number for {few(names)}: {reason}" for reason, names in unknown.items()]
        return [
            *self.wrapped(f"{of} ({what})"),
            *(self._columns([(ranking.noun, "last", "median"), *rows]) if rows else ()),
            *(line for gap in gaps for line in self.wrapped(gap.removesuffix(": "), "    ")),
        ]

    def dead_units(self, found: Sequence[DeadUnits]) -> list[str]:
        """The indices of each layer's dead units, or the first of many."""
        lines = []
        for heading, layers in itertools.groupby(found, lambda one: (one.series, one.step)):
            lines += self.wrapped(f"dead units at step {heading[1]} by {heading[0]}, from 0 on")
            for one in layers:
                more = len(one.units) - MOST_UNITS
                ends = f", and {more} more" if more > 0 else ""
                units = ", ".join(map(str, one.units[:MOST_UNITS]))
                lines += self.wrapped(f"layer {one.layer}: {units}{ends}", "  ")
        return lines

    def _columns(self, rows: Sequence[tuple[str, str, str]]) -> list[str]:
        """A name and two numbers in each row, or the second number alone where there is no room."""
        cells = [tuple(map(self.text, row)) for row in rows]
        longest, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
        shown = slice(0 if sum(widths) + 6 < self.width else 1, None)
        room = self.width - sum(width + 2 for width in widths[shown]) - 2
        lines = []
        for name, *numbers in cells:
            # As in the table, a name that is too long has lines of its own.
            is_short = len(name) <= room
            lines += [] if is_short else self.wrapped(name, "  ")
            start = f"  {name if is_short else ''}".ljust(2 + min(longest, room))
            columns = zip(numbers[shown], widths[shown], strict=True)
            lines.append(_line(start, "", [(text, width, "  ") for text, width in columns]))
        return lines

    def coverage(self, table: CoverageTable | None) -> list[str]:
        if table is None:
            return []
        return self._indented(table.short())

    def spending(self, spending: Spending | None) -> list[str]:
        return [] if spending is None else self._indented([*spending.lines()])

    def _indented(self, lines: Sequence[str]) -> list[str]:
        first, *rest = lines
        return [*self.wrapped(first), *(line for row in rest for line in self.wrapped(row, "  "))]

    def notes(self, notes: Sequence[Note]) -> list[str]:
        if not notes:
            return []
        shown = [f"step {note.step}: {note.text}" for note in notes[-NOTES:]]
        earlier = f" (the latest {NOTES} of {len(notes)})" if len(notes) > NOTES else ""
        return [f"notes{earlier}", *(line for note in shown for line in self.wrapped(note, "  "))]

    def _sparkline(self, row: Row, width: int) -> str:
        levels = PLAIN_LEVELS if self.plain else LEVELS
        log = row.scalar.view.yscale == "log"
        return sparkline(row.scalar.line, width, log, levels) if width > 0 else ""


def _line(name: str, trend: str, cells: Sequence[tuple[str, int, str]]) -> str:
    """A row of the table; each cell has a text, a width, and a gap to the left of it."""
    padded = [gap + text.rjust(width) for text, width, gap in cells]
    padded.insert(1, TREND_GAP + trend if trend else "")
    return name + "".join(padded)


def _cells(row: Row) -> tuple[str, ...]:
    extremes = (*_extreme_cells(row.low), *_extreme_cells(row.high))
    return (shown(row.last), _change(row.change), *extremes, str(row.steps))


def _extreme_cells(one: Extreme | None) -> tuple[str, str]:
    return (shown(one.value), str(one.step)) if one else ("", "")


def shown(value: float) -> str:
    """A number as ``float`` reads it, and not with the minus sign and infinity of a figure."""
    return number_label(value).replace("−", "-").replace("∞", "inf")


def _change(value: float) -> str:
    if math.isnan(value):
        return ""
    if abs(value) < FLAT:
        return "→"
    arrow = "↗" if value > 0 else "↘"
    if value >= 9.95:
        return f"{arrow} ×{number_label(1 + value, 2)}"
    return f"{arrow} {100 * value:+.0f}%"


def _undefined(row: Row) -> str:
    if not row.undefined:
        return ""
    count = f"{row.undefined} NaN, the latest at step {row.undefined_step}"
    return f"{count}: {row.reason}" if row.reason else count


def _extent(summary: Summary) -> str:
    steps = summary.steps
    cut = "; the file is cut off" if summary.truncated else ""
    if len(steps) < 2:
        return (f"one step, {steps[0]}" if steps else "no steps") + cut
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}{cut}"


def _series_without(what: str, names: Sequence[str]) -> str:
    return f"without {what}: {', '.join(names)}" if names else ""


# For other programs -------------------------------------------------------------------------

COLUMNS = (
    "run",
    "step",
    "series",
    "last",
    "change",
    "min",
    "min_step",
    "max",
    "max_step",
    "steps",
    "undefined",
    "undefined_step",
    "reason",
)
"""Of a table of several runs; ``step`` is the latest of a run."""


def as_json(summary: Summary, run: str) -> str:
    """A summary as one line of strict JSON; see ``docs/command-line.rst``."""
    table = summary.coverage
    found = {
        "run": run,
        "steps": len(summary.steps),
        "first_step": summary.steps[0] if summary.steps else None,
        "last_step": _latest(summary),
        "truncated": summary.truncated,
        "findings": [asdict(finding) for finding in summary.findings],
        "series": [_entries(row) for row in summary.rows],
        "without_single_numbers": dict(summary.others),
        "noise": [asdict(ranking) for ranking in summary.noise],
        "dead_units": [asdict(one) for one in summary.dead_units],
        "coverage": None if table is None else {"share": table.share, **asdict(table.coverage)},
        "spending": None if summary.spending is None else asdict(summary.spending),
        "notes": [asdict(note) for note in summary.notes],
    }
    return as_line(found)


def as_csv(summary: Summary, run: str, heading: bool = True) -> str:
    """A summary's table as CSV with ``COLUMNS``, without a line break at the end.

    A NaN is an empty field.
    """
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if heading:
        table.writeheader()
    for row in summary.rows:
        table.writerow({"run": run, "step": _latest(summary), **strict(_entries(row))})
    return text.getvalue().rstrip("\n")


def _latest(summary: Summary) -> int | None:
    return summary.steps[-1] if summary.steps else None


def _entries(row: Row) -> dict[str, Any]:
    low, high = row.low, row.high
    return {
        "series": row.scalar.name,
        "last": row.last,
        "change": row.change,
        "min": low and low.value,
        "min_step": low and low.step,
        "max": high and high.value,
        "max_step": high and high.step,
        "steps": row.steps,
        "undefined": row.undefined,
        "undefined_step": row.undefined_step,
        "reason": row.reason,
    }
