"""Recorded histograms as arrays: pure functions that the histogram instruments share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradlens.history.lines import Floats
from gradlens.history.series import Series


@dataclass(frozen=True)
class Histogram:
    """Counts ``[bins]`` or ``[bins_x, bins_y]`` and the edges of the bins on each axis.

    ``below`` and ``above`` count the clipped elements of each axis, which are also in its outer
    bins. ``nan`` counts elements that are in no bin.
    """

    step: int
    counts: Floats
    edges: tuple[Floats, ...]
    below: tuple[int, ...]
    above: tuple[int, ...]
    nan: int

    @property
    def clipped(self) -> float:
        """Largest fraction of elements that is clipped on one axis; 0 for an empty histogram."""
        most = max(
            (low + high for low, high in zip(self.below, self.above, strict=True)), default=0
        )
        return most / self.counts.sum() if self.counts.any() else 0.0

    @property
    def density(self) -> Floats:
        """Fraction of elements per unit, for a one-dimensional histogram."""
        return self.counts / max(self.counts.sum(), 1) / np.diff(self.edges[0])

    def mean_density(self, edges: Floats) -> Floats:
        """The mean of the density between other edges, for a one-dimensional histogram."""
        below = np.concatenate(([0.0], np.cumsum(self.counts))) / self.counts.sum()
        return np.asarray(np.diff(np.interp(edges, self.edges[0], below)) / np.diff(edges))

    def occupied(self, axis: int) -> tuple[float, float]:
        """Range of the bins on one axis that aren't empty; the whole axis if all are."""
        counts = self.counts if self.counts.ndim == 1 else self.counts.sum(axis=1 - axis)
        filled = np.flatnonzero(counts)
        edges = self.edges[axis]
        if not filled.size:
            return float(edges[0]), float(edges[-1])
        return float(edges[filled[0]]), float(edges[filled[-1] + 1])

    def excess(self, clipped: bool = True) -> str:
        """Fractions of clipped elements and of NaN as text; empty if there are none."""
        parts = [f"{percent(self.clipped)} clipped"] if self.clipped and clipped else []
        if self.nan:
            parts.append(f"{percent(self.nan / (self.nan + self.counts.sum()))} NaN")
        return " · ".join(parts)


def percent(share: float) -> str:
    """A fraction as a percentage with two digits, and as 0 % only if it is 0."""
    if 0 < share < 1e-4:
        return "< 0.01 %"
    return f"{100 * share:.2g} %" if share < 0.0995 else f"{100 * share:.0f} %"


def ends(records: Series) -> list[Histogram]:
    """The first and the last recorded histogram that aren't empty, or the only one."""
    first = _first_filled(records, records)
    last = _first_filled(records, reversed(records))
    return [*first, *(one for one in last if one.step != first[0].step)]


def _first_filled(records: Series, steps: Iterable[int]) -> list[Histogram]:
    values = ((step, records[step]) for step in steps)
    read = (histogram(step, value) for step, value in values if isinstance(value, Mapping))
    one = next((one for one in read if one.counts.any()), None)
    return [] if one is None else [one]


def histogram(step: int, value: Mapping[str, Any], edges: Any = None) -> Histogram:
    """One recorded histogram; ``edges`` for one that shares them with another."""
    counts = np.asarray(value["hist"], dtype=np.float64)
    edges = value["edges"] if edges is None else edges
    axes = [edges] if counts.ndim == 1 else edges
    arrays = tuple(np.asarray(axis, dtype=np.float64) for axis in axes)
    below, above = _whole(value.get("below", 0)), _whole(value.get("above", 0))
    return Histogram(step, counts, arrays, below, above, int(value.get("nan", 0)))


def by_parameter(step: int, value: Mapping[str, Any]) -> dict[str, Histogram]:
    """The histograms of one record for each parameter, on the edges of the whole."""
    parts = value.get("parameters", {})
    return {name: histogram(step, part, value["edges"]) for name, part in parts.items()}


def latest(records: Series, part: str = "") -> tuple[int, Mapping[str, Any]] | None:
    """Step and value of the last record that is a dict; with ``part``, of one that has this key."""
    values = ((step, records[step]) for step in reversed(records))
    found = ((step, value) for step, value in values if isinstance(value, Mapping))
    return next(((step, value) for step, value in found if not part or value.get(part)), None)


def _whole(value: Any) -> tuple[int, ...]:
    return tuple(int(count) for count in np.ravel(value))
