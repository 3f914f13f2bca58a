"""Facts of a run, which are recorded whatever is tracked."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gradlens.history.finding import Finding
from gradlens.history.setup import Setup

OF_SAMPLES = ("row_largest", "bad_row", "loss_largest")
"""Columns with places of samples in the batch. Beside each, there may be one with the user's ids,
such as ``bad_row_id``."""

MOST_STEPS = 8192
"""Rows of the steps' table: 30 columns of them take a megabyte."""
MOST_LAYER_ROWS = 256
"""Rows of the layers' table, which has a row every 20th step: with 1,000 parameters, they take six
megabytes."""


TableName: TypeAlias = Literal["steps", "layers"]

Floats = NDArray[np.float32]
Steps = NDArray[np.int64]


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

    def table(self, name: TableName) -> FactTable:
        """The table ``"steps"`` or ``"layers"``."""
        return self.steps if name == "steps" else self.layers

    def between(self, first: float, end: float) -> Facts:
        """The facts of the steps from ``first`` on and before ``end``."""
        return Facts(
            {at: setup for at, setup in self.setups.items() if at < end},
            self.steps.between(first, end),
            self.layers.between(first, end),
            [finding for finding in self.findings if first <= finding.step < end],
        )

    def add_rows(self, rows: Rows) -> None:
        """Add rows to one of the tables."""
        columns = {n: one.tolist() for n, one in zip(rows.names, rows.numbers, strict=True)}
        self.table(rows.table).add(rows.steps, columns)

    def all_rows(self) -> Iterator[Rows]:
        """The rows of the tables that have any."""
        for name in get_args(TableName):
            table = self.table(name)
            if len(table):
                columns = np.array([table[each] for each in table.names], dtype=np.float32)
                numbers = columns.reshape(len(table.names), len(table))
                yield Rows(name, tuple(table.steps.tolist()), table.names, numbers)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a table of the facts: ``numbers`` ``[names, steps]`` in single precision."""

    table: TableName
    steps: tuple[int, ...]
    names: tuple[str, ...]
    numbers: np.ndarray

    def __post_init__(self) -> None:
        shape, found = (len(self.names), len(self.steps)), self.numbers
        if found.shape != shape or found.dtype.kind != "f" or not self.steps:
            raise ValueError(f"the facts are an array of shape {found.shape}")

    @classmethod
    def of(cls, table: TableName, rows: Mapping[int, Mapping[str, float]]) -> Rows:
        """Rows by step; numbers out of the range of single precision are ±∞, absent ones NaN."""
        names = tuple(dict.fromkeys(name for row in rows.values() for name in row))
        columns = [[row.get(name, math.nan) for row in rows.values()] for name in names]
        with np.errstate(over="ignore"):
            numbers = np.array(columns, dtype=np.float32).reshape(len(names), len(rows))
        return cls(table, tuple(rows), names, numbers)


class FactTable:
    """A table with a row for each step and a column for each name, of at most ``most`` rows.

    A table that is full loses every second row of its older three quarters, so that its memory is
    bounded and the latest steps are there without gaps. Numbers are kept in single precision, as in
    a run's file: those out of its range are ±∞.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: dict[int, array[float]] = {}
        self._places: dict[str, int] = {}
        """The places of the columns in rows; a row that ends before one has no number there."""

    def add(self, steps: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
        """Add rows, in place of those of the same steps; a column that isn't given is NaN there."""
        places = [self._places.setdefault(name, len(self._places)) for name in columns]
        for at, step in enumerate(steps):
            row = array("f", [math.nan]) * len(self._places)
            for place, column in zip(places, columns.values(), strict=True):
                row[place] = column[at]
            self._rows[step] = row
        if len(self._rows) > self._most:
            older = sorted(self._rows)[: 3 * len(self._rows) // 4]
            for step in older[1::2]:
                del self._rows[step]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in the order in which they were added."""
        return tuple(self._places)

    @property
    def steps(self) -> Steps:
        """``[K]``, ascending, each once."""
        return np.array(sorted(self._rows), dtype=np.int64)

    def __getitem__(self, name: str) -> Floats:
        """The column of this name ``[K]``; NaN where there is no number."""
        place = self._places.get(name, len(self._places))
        rows = (self._rows[step] for step in sorted(self._rows))
        return np.array([r[place] if place < len(r) else math.nan for r in rows], dtype=np.float32)

    def under(self, kind: str) -> dict[str, Floats]:
        """The columns whose names begin with ``kind/``, by the rest of their names."""
        names = [name for name in self._places if name.startswith(f"{kind}/")]
        return {name.removeprefix(f"{kind}/"): self[name] for name in names}

    def between(self, first: float, end: float) -> FactTable:
        """The rows of the steps from ``first`` on and before ``end``."""
        found = FactTable(self._most)
        found._places = {**self._places}
        found._rows = {step: row for step, row in self._rows.items() if first <= step < end}
        return found
