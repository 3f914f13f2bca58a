"""A summary as lines of text for a terminal, and as JSON and CSV for other programs."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from gradlens.cli.panels_text import sparkline
from gradlens.cli.text import aligned, as_line, printable, strict, wrapped
from gradlens.diagnosis.opening import opening
from gradlens.history.coverage import few
from gradlens.history.finding import Finding
from gradlens.history.records import Note
from gradlens.instruments.scales import number_label
from gradlens.plotting.summary import DeadUnits, NoiseRanking, Row, Summary, extent

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


def render(summary: Summary, width: int = 80, title: str = "") -> str:
    """A summary as lines of at most ``width`` characters, if these are 20 or more."""
    history, table = summary.history, summary.coverage
    short = opening(history, summary.findings)
    spending = [] if history.spending is None else [*history.spending.lines()][bool(short) :]
    covered = [] if table is None else table.short()[bool(short) :]
    filled = [name for name, count in summary.others.items() if count]
    empty = [name for name, count in summary.others.items() if not count]
    cut = "; the file is cut off" if history.truncated else ""
    whole = f"{extent(history)}{cut}"
    sections = (
        wrapped(f"{title}: {whole}" if title else whole, width),
        [line for each in short for line in wrapped(each, width, hanging="  ")],
        findings_text(summary.findings, title or "RUN", width),
        _table(summary.rows, width),
        wrapped(f"without single numbers: {', '.join(filled)}" if filled else "", width),
        wrapped(f"without records: {', '.join(empty)}" if empty else "", width),
        *(_noise(ranking, width) for ranking in summary.noise),
        _dead_units(summary.dead_units, width),
        _indented(covered, width),
        _indented(spending, width),
        _notes(history.notes, width),
    )
    return "\n\n".join("\n".join(section) for section in sections if section)


def findings_text(findings: Sequence[Finding], run: str, width: int) -> list[str]:
    """The first findings, with what they have caused further to the right."""
    if not findings:
        return []
    certainly = "is" if any(finding.is_alarm for finding in findings) else "may be"
    lines = wrapped(f"what {certainly} wrong (gradlens diagnose {run} says more)", width)
    for finding in findings[:FINDINGS]:
        indent = "    " if finding.explained_by else "  "
        notice = "" if finding.is_alarm else "notice, "
        lines += wrapped(f"{notice}step {finding.step}: {finding.headline}", width, indent)
    more = len(findings) - FINDINGS
    return [*lines, *(wrapped(f"and {more} more", width, "  ") if more > 0 else ())]


def _table(rows: Sequence[Row], width: int) -> list[str]:
    if not rows:
        return []
    names = [printable(" ".join(row.scalar.name.split())) for row in rows]
    cells = [HEADINGS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # Characters for name and trend beside each choice of columns.
    taken = [sum(widths[c] + len(GAPS[c]) for c in columns) for columns in CHOICES]
    rooms = [width - each - len(TREND_GAP) for each in taken]
    longest = max(len("series"), *map(len, names))
    place = next((n for n, room in enumerate(rooms) if room >= longest + SPARK[0]), -1)
    room, shown = rooms[place], CHOICES[place]
    name = min(room + len(TREND_GAP), longest)
    spark = min(room - name, SPARK[1]) if room - name >= SPARK[0] else 0
    lines_of = [(row.scalar.line, row.scalar.view.yscale == "log") for row in rows]
    trends = ["trend", *(sparkline(line, spark, log) for line, log in lines_of)]
    first = {row.reason: name for row, name in zip(rows[::-1], names[::-1], strict=True)}
    notes = ["", *(_undefined(r, name, first) for r, name in zip(rows, names, strict=True))]
    lines = []
    for head, trend, line, note in zip(("series", *names), trends, cells, notes, strict=True):
        # A name that is too long for the table has lines of its own.
        is_short = len(head) <= name
        lines += [] if is_short else wrapped(head, width)
        values = [GAPS[column] + line[column].rjust(widths[column]) for column in shown]
        drawn = [TREND_GAP + trend.ljust(spark)[:spark]] if spark else []
        start = (head if is_short else "").ljust(name)
        lines.append("".join([start, values[0], *drawn, *values[1:]]))
        lines += wrapped(note, width, "    ")
    return lines


def _noise(ranking: NoiseRanking, width: int) -> list[str]:
    """The noisiest layers, and those without a number."""
    known = [one for one in ranking.layers if not math.isnan(one.median)]
    unknown: dict[str, list[str]] = {}
    for one in ranking.layers[len(known) :]:
        unknown.setdefault(one.reason, []).append(one.name)
    what = ranking.label if ranking.large_is_noisy else f"{ranking.label}; small is noisy"
    of = f"noisiest of {len(ranking.layers)} {ranking.noun}s by {ranking.series}"
    rows = [(one.name, shown(one.last), shown(one.median)) for one in known[:NOISIEST]]
    table = aligned([(ranking.noun, "last", "median"), *rows]) if rows else []
    gaps = [f"no number for {few(names)}: {reason}" for reason, names in unknown.items()]
    lines = wrapped(f"{of} ({what})", width)
    for row in table:
        # A name that is too long has lines of its own.
        lines += [f"  {row}"] if len(row) < width - 2 else wrapped(row, width, "  ")
    return lines + [line for gap in gaps for line in wrapped(gap.removesuffix(": "), width, "    ")]


def _dead_units(found: Sequence[DeadUnits], width: int) -> list[str]:
    """The indices of each layer's dead units, or the first of many."""
    lines = []
    for heading, layers in itertools.groupby(found, lambda one: (one.series, one.step)):
        lines += wrapped(f"dead units at step {heading[1]} by {heading[0]}, from 0 on", width)
        for one in layers:
            more = len(one.units) - MOST_UNITS
            ends = f", and {more} more" if more > 0 else ""
            units = ", ".join(map(str, one.units[:MOST_UNITS]))
            lines += wrapped(f"layer {one.layer}: {units}{ends}", width, "  ")
    return lines


def _indented(lines: Sequence[str], width: int) -> list[str]:
    """Lines, those behind the first one further to the right."""
    places = zip(lines, itertools.chain([""], itertools.repeat("  ")), strict=False)
    return [line for text, indent in places for line in wrapped(text, width, indent)]


def _notes(notes: Sequence[Note], width: int) -> list[str]:
    texts = [f"step {note.step}: {note.text}" for note in notes[-NOTES:]]
    earlier = f" (the latest {NOTES} of {len(notes)})" if len(notes) > NOTES else ""
    return _indented([f"notes{earlier}", *texts], width) if notes else []


def _cells(row: Row) -> tuple[str, ...]:
    low, high = ("" if value is None else shown(value) for value in (row.min, row.max))
    at_low, at_high = ("" if step is None else str(step) for step in (row.min_step, row.max_step))
    return (shown(row.last), _change(row.change), low, at_low, high, at_high, str(row.steps))


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


def _undefined(row: Row, name: str, first: Mapping[str, str]) -> str:
    """How many NaN a row has, and why; a reason is said of the ``first`` one that has it."""
    if not row.undefined:
        return ""
    count = f"{row.undefined} NaN, the latest at step {row.undefined_step}"
    if not row.reason:
        return count
    teller = first[row.reason]
    return f"{count}: {row.reason if teller == name else f'as for {teller}'}"


# For other programs -------------------------------------------------------------------------

OF_A_ROW = [field.name for field in fields(Row) if field.name != "scalar"]
COLUMNS = ["run", "step", "series", *OF_A_ROW]
"""Of a table of several runs; ``step`` is the latest of a run."""


def as_json(summary: Summary, run: str) -> str:
    """A summary as one line of strict JSON; see ``docs/command-line.rst``."""
    history, table = summary.history, summary.coverage
    steps = history.steps
    found = {
        "run": run,
        "steps": len(steps),
        "first_step": steps[0] if steps else None,
        "last_step": steps[-1] if steps else None,
        "truncated": history.truncated,
        "findings": summary.findings,
        "series": [_entries(row) for row in summary.rows],
        "without_single_numbers": summary.others,
        "noise": summary.noise,
        "dead_units": summary.dead_units,
        "coverage": None if table is None else {"share": table.share, **asdict(table.coverage)},
        "spending": history.spending,
        "notes": history.notes,
    }
    return as_line(found)


def as_csv(summary: Summary, run: str, heading: bool = True) -> str:
    """A summary's table as CSV with ``COLUMNS``, without a line break at the end.

    A NaN is an empty field.
    """
    step = max(summary.history.steps, default=None)
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if heading:
        table.writeheader()
    for row in summary.rows:
        table.writerow({"run": run, "step": step, **strict(_entries(row))})
    return text.getvalue().rstrip("\n")


def _entries(row: Row) -> dict[str, Any]:
    return {"series": row.scalar.name, **{name: getattr(row, name) for name in OF_A_ROW}}
