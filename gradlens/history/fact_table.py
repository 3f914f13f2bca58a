"""Numbers by name at some steps, of which those of the far past are thinned out."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Steps = NDArray[np.int64]


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

    def rewind(self, step: int) -> None:
        """Remove the rows of all steps after this one."""
        self._keep(np.flatnonzero(np.array(self._steps, dtype=np.int64) <= step))

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
        self._keep(np.concatenate([np.arange(0, older, 2), np.arange(older, count)]))

    def _keep(self, places: NDArray[np.int64]) -> None:
        self._steps = array("q", np.array(self._steps, dtype=np.int64)[places].tobytes())
        self._columns = {
            name: array("f", np.array(column, dtype=np.float32)[places].tobytes())
            for name, column in self._columns.items()
        }


def _nans(count: int) -> array[float]:
    return array("f", [float("nan")]) * count
