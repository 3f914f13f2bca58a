"""Facts of a run, which are recorded whatever is tracked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradlens.history.fact_table import FactTable
from gradlens.history.finding import Finding
from gradlens.history.json_lines import Value
from gradlens.history.schema import Fields, Is, ListOf, OneOf, Whole
from gradlens.history.setup import Setup

OF_SAMPLES = ("row_largest", "bad_row", "loss_largest")
"""Columns with places of samples in the batch. Beside each, there may be one with the user's ids,
such as ``bad_row_id``."""

MOST_STEPS = 8192
"""Rows of the steps' table: 30 columns of them take a megabyte."""
MOST_LAYER_ROWS = 256
"""Rows of the layers' table, which has a row every 20th step: with 1,000 parameters, they take six
megabytes."""


@dataclass
class Facts:
    """The facts of a run.

    ``setups`` are what the run consists of, by each step from which on that has changed. ``steps``
    has numbers of each step, and ``layers`` those of layers and parameters at some steps.
    ``findings`` are what was found wrong while the run was going on.
    """

    setups: dict[int, Setup] = field(default_factory=dict)
    steps: FactTable = field(default_factory=lambda: FactTable(MOST_STEPS))
    layers: FactTable = field(default_factory=lambda: FactTable(MOST_LAYER_ROWS))
    findings: list[Finding] = field(default_factory=list)

    def table(self, name: str) -> FactTable:
        """The table ``"steps"`` or ``"layers"``."""
        return {"steps": self.steps, "layers": self.layers}[name]

    def rewind(self, step: int) -> None:
        """Remove what was found after a step."""
        self.setups = {at: setup for at, setup in self.setups.items() if at <= step}
        self.findings = [finding for finding in self.findings if finding.step <= step]
        self.steps.rewind(step)
        self.layers.rewind(step)

    def between(self, first: float, end: float) -> Facts:
        """The facts of the steps from ``first`` on and before ``end``."""
        return Facts(
            {at: setup for at, setup in self.setups.items() if at < end},
            self.steps.between(first, end),
            self.layers.between(first, end),
            [finding for finding in self.findings if first <= finding.step < end],
        )

    def take_in(self, record: Mapping[str, Any]) -> None:
        """Add a record of a run's file; ``ValueError`` if it has another form."""
        if "setup" in record:
            self.setups[_step(record)] = Setup.from_plain(record["setup"])
        elif "finding" in record:
            self.findings.append(Finding.from_plain(record["finding"]))
        else:
            self._add_rows(record["facts"])

    def _add_rows(self, rows: Any) -> None:
        ROWS.check(rows, "the facts")
        numbers, steps, names = rows["numbers"], rows["steps"], rows["names"]
        if numbers.shape != (len(names), len(steps)) or numbers.dtype.kind != "f":
            raise ValueError(f"the facts are an array of shape {numbers.shape}")
        columns = {name: column.tolist() for name, column in zip(names, numbers, strict=True)}
        self.table(rows["table"]).add(steps, columns)

    def records(self) -> Iterator[dict[str, Value]]:
        """The records of a run's file."""
        for step, setup in self.setups.items():
            yield setup_record(step, setup)
        for name in TABLES:
            table = self.table(name)
            if len(table):
                columns = {each: table[each] for each in table.names}
                yield rows_record(name, table.steps.tolist(), columns)
        yield from map(finding_record, self.findings)


def setup_record(step: int, setup: Setup) -> dict[str, Value]:
    """The record of what a run consists of from a step on."""
    return {"step": step, "setup": setup.plain()}


def finding_record(finding: Finding) -> dict[str, Value]:
    """The record of something that was found wrong."""
    return {"step": finding.step, "finding": finding.plain()}


def rows_record(
    table: str, steps: Sequence[int], columns: Mapping[str, Sequence[float] | np.ndarray]
) -> dict[str, Value]:
    """The record of rows of a table; numbers out of the range of single precision are ±∞."""
    with np.errstate(over="ignore"):
        numbers = np.array([*columns.values()], dtype=np.float32).reshape(len(columns), len(steps))
    rows = {"table": table, "steps": [*steps], "names": [*columns], "numbers": numbers}
    return {"step": steps[-1], "facts": rows}


def _step(record: Mapping[str, Any]) -> int:
    Fields({"step": Whole(-(2**53), 2**53)}).check(record, "the record")
    found: int = record["step"]
    return found


TABLES = ("steps", "layers")

MOST_ROWS = 100_000
"""A record has at most so many rows or columns."""

ROWS = Fields(
    {
        "table": OneOf(TABLES),
        "steps": ListOf(Whole(-(2**53), 2**53), MOST_ROWS),
        "names": ListOf(Is(str), MOST_ROWS),
        "numbers": Is(np.ndarray),
    }
)
