"""Quantiles of a stream of numbers, in memory that grows with the logarithm of their count."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from gradlens.stateful import State

LEVEL_SIZE = 512
"""Numbers that a sketch keeps in each level, 4 KiB of floats. The quantiles' rank error is
inversely proportional to it: see ``QuantileSketch``."""


class QuantileSketch:
    """Quantiles of a stream of numbers, exact for up to ``LEVEL_SIZE`` of them.

    A number in level k represents 2ᵏ numbers. A level that is full is sorted, and every second of
    its numbers moves to the next level, alternately the even and the odd ones, so that the result
    is deterministic (after Manku et al., 1998). With n numbers, the rank of a quantile is off by at
    most ⌈log₂(n/512)⌉/512 of n: 0.4 % at 2,000 numbers and 2.2 % at a million.
    """

    def __init__(self) -> None:
        self._levels: list[list[float]] = [[]]
        self._odd: list[bool] = [False]

    def add(self, value: float) -> None:
        """Add a number."""
        self._levels[0].append(value)
        self._compress()

    def quantile(self, share: float) -> float:
        """The number below which this share of all numbers is, interpolated linearly.

        NaN if there is no number.
        """
        weighted = sorted((v, 2**level) for level, vs in enumerate(self._levels) for v in vs)
        if not weighted:
            return math.nan
        # The rank of a number is the middle of the ranks that it represents.
        ranks, below = [], 0
        for _, weight in weighted:
            ranks.append(below + (weight - 1) / 2)
            below += weight
        rank = share * (below - 1)
        place = bisect_left(ranks, rank)
        if place == 0 or place == len(ranks):
            return weighted[min(place, len(ranks) - 1)][0]
        (low, _), (high, _) = weighted[place - 1 : place + 1]
        part = (rank - ranks[place - 1]) / (ranks[place] - ranks[place - 1])
        return _between(low, high, part)

    def state_dict(self) -> State:
        """The numbers that are kept."""
        return {"levels": [list(values) for values in self._levels], "odd": list(self._odd)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._levels = [list(values) for values in state["levels"]]
        self._odd = list(state["odd"])

    def _create_levels(self, highest: int) -> None:
        while len(self._levels) <= highest:
            self._levels.append([])
            self._odd.append(False)

    def _compress(self) -> None:
        """Halve the levels that are full."""
        level = 0
        while level < len(self._levels):
            values = self._levels[level]
            if len(values) > LEVEL_SIZE:
                self._create_levels(level + 1)
                values.sort()
                # With an odd count, the largest one stays.
                rest = [values.pop()] if len(values) % 2 else []
                self._levels[level + 1] += values[self._odd[level] :: 2]
                self._levels[level] = rest
                self._odd[level] = not self._odd[level]
            level += 1


def _between(low: float, high: float, part: float) -> float:
    """Linear interpolation: infinite next to an infinity, NaN between infinities of both signs."""
    if low == high or part == 1:
        return high
    if math.isinf(low) or math.isinf(high):
        return low + high
    # Either form overflows where the other one doesn't.
    return low * (1 - part) + high * part if low < 0 < high else low + part * (high - low)
