"""Facts of a run, which are recorded whatever is tracked."""

from __future__ import annotations

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
        return {"steps": self.steps, "layers": self.layers}[name]

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
                columns = {each: table[each] for each in table.names}
                yield Rows.of(name, table.steps.tolist(), columns)


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
    def of(
        cls,
        table: TableName,
        steps: Sequence[int],
        columns: Mapping[str, Sequence[float] | Floats],
    ) -> Rows:
        """Rows of these columns; numbers out of the range of single precision are ±∞."""
        shape = (len(columns), len(steps))
        with np.errstate(over="ignore"):
            numbers = np.array([*columns.values()], dtype=np.float32).reshape(shape)
        return cls(table, tuple(steps), tuple(columns), numbers)


class FactTable:
    """A table with a row for each step and a column for each name, of at most ``most`` rows.

    A table that is full loses every second row of its older three quarters, so that its memory is
    bounded and the latest steps are there without gaps. Numbers are kept in single precision, as in
    a run's file: those out of its range are ±∞.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def add(self, steps: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
        """Add rows; a column that isn't given, or hasn't been given before, is NaN there."""
        count = len(self._steps)
        for name in columns:
            if name not in self._columns:
                self._columns[name] = _nans(count)
        for name, column in self._columns.items():
            column.extend(columns[name] if name in columns else _nans(len(steps)))
        self._steps.extend(steps)
        if len(self._steps) > self._most:
            self._thin_out()

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in the order in which they were added."""
        return tuple(self._columns)

    @property
    def steps(self) -> Steps:
        """``[K]``, ascending, each once."""
        return np.array(self._steps, dtype=np.int64)[self._rows]

    def __getitem__(self, name: str) -> Floats:
        """The column of this name ``[K]``; NaN where there is no number."""
        if name not in self._columns:
            return np.full(len(self), np.nan, dtype=np.float32)
        return np.array(self._columns[name], dtype=np.float32)[self._rows]

    def under(self, kind: str) -> dict[str, Floats]:
        """The columns whose names begin with ``kind/``, by the rest of their names."""
        names = [name for name in self._columns if name.startswith(f"{kind}/")]
        return {name.removeprefix(f"{kind}/"): self[name] for name in names}

    def between(self, first: float, end: float) -> FactTable:
        """The rows of the steps from ``first`` on and before ``end``."""
        found = FactTable(self._most)
        steps = self.steps
        chosen = (steps >= first) & (steps < end)
        columns = {name: self[name][chosen].tolist() for name in self._columns}
        found.add(steps[chosen].tolist(), columns)
        return found

    @property
    def _rows(self) -> NDArray[np.int64] | slice:
        """Places of the rows by ascending step; of a step that was repeated, the last one."""
        steps = np.array(self._steps, dtype=np.int64)
        if (np.diff(steps) > 0).all():  # as almost always, and much faster than sorting
            return slice(None)
        _, places = np.unique(steps[::-1], return_index=True)
        found: NDArray[np.int64] = len(steps) - 1 - places
        return found

    def _thin_out(self) -> None:
        count = len(self._steps)
        older = 3 * count // 4
        places = np.concatenate([np.arange(0, older, 2), np.arange(older, count)])
        self._steps = array("q", np.array(self._steps, dtype=np.int64)[places].tobytes())
        self._columns = {
            name: array("f", np.array(column, dtype=np.float32)[places].tobytes())
            for name, column in self._columns.items()
        }


def _nans(count: int) -> array[float]:
    return array("f", [float("nan")]) * count
