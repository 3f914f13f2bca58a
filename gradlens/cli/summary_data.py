"""A summary as JSON and as CSV, for other programs."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from gradlens.cli.columns import as_line, strict
from gradlens.history.plain_data import plain
from gradlens.plotting.summary import Row, Summary

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
        "findings": [plain(finding) for finding in summary.findings],
        "series": [_entries(row) for row in summary.rows],
        "without_single_numbers": dict(summary.others),
        "noise": [asdict(ranking) for ranking in summary.noise],
        "dead_units": [asdict(one) for one in summary.dead_units],
        "coverage": None if table is None else {"share": table.share, **plain(table.coverage)},
        "spending": None if summary.spending is None else plain(summary.spending),
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
