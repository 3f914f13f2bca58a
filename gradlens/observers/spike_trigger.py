"""Decides at which steps the loss has jumped, from the losses alone."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gradlens.history.spikes import NEVER
from gradlens.stateful import State

AT_LEAST = 12
"""Losses before the first jump that can be found. The median of the first ones is the loss at the
start of the run."""
RECENT = 50
"""Latest losses that a loss is compared with. As many steps after a jump, these are losses at the
new level, which is no jump any more."""
DEVIATIONS = 9.0
"""Median absolute deviations above the median: six standard deviations of a normal distribution."""
OF_START = 0.5
"""Least jump, over the loss at the start. In 72 healthy runs of 800 steps on scikit-learn's digits
and diabetes, with batches of 16 and 64, a loss jumps as far once in ten runs, and a tenth as far
three times a run."""
OF_MEDIAN = 0.5
"""Least jump, over the median before."""
REST = 10
"""Steps after the first jump in which another one doesn't count, unless it is ``LARGER``; after
each further one, they are one more, so that T steps have fewer than the square root of 2T."""
LARGER = 3.0
"""Times the jump before, above which a jump always counts."""


@dataclass(frozen=True)
class Jump:
    """A loss that has jumped or isn't finite; see ``Spike`` for the rest."""

    loss: float
    median: float = math.nan
    deviation: float = math.nan
    start: float = math.nan


@dataclass
class _Excursion:
    """The losses since a jump at a step, until one is below the ``limit`` again."""

    step: int
    limit: float
    losses: int = 0


class SpikeTrigger:
    """Takes in one loss after the other.

    A loss has jumped if it is larger than all recent ones, and ``DEVIATIONS`` above their median.
    It counts once, until it is back; and a loss that isn't finite, until one is.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._first: list[float] = []
        self._was_finite = True
        self._excursion: _Excursion | None = None
        self._count = 0
        self._last_step = 0
        self._last_size = 0.0

    def take_in(self, step: int, loss: float) -> Jump | None:
        """The jump, if the loss of this step is one."""
        found = self._jump(step, loss)
        self._was_finite = math.isfinite(loss)
        if self._was_finite:
            self._recent.append(loss)
            if len(self._first) < AT_LEAST:
                self._first.append(loss)
        return found

    def recovery(self, step: int, loss: float) -> tuple[int, int] | None:
        """The step of the last jump and ``Spike.back``, if this is known by this loss."""
        excursion = self._excursion
        if excursion is None:
            return None
        excursion.losses += 1
        if loss <= excursion.limit:
            self._excursion = None
            return excursion.step, max(step - excursion.step, 0)
        if excursion.losses >= RECENT:
            self._excursion = None
            return excursion.step, NEVER
        return None

    def expect_not_finite(self) -> None:
        """The next losses won't be finite, since gradients are not: this doesn't count again."""
        self._was_finite = False

    def _jump(self, step: int, loss: float) -> Jump | None:
        recent, is_finite = self._recent, math.isfinite(loss)
        if not is_finite and not self._was_finite:
            return None
        is_new = self._excursion is None and len(recent) >= AT_LEAST
        if is_finite and (not is_new or loss <= max(recent)):
            return None
        found, limit = Jump(loss), sys.float_info.max
        if recent:
            middle = median(recent)
            deviation = median([abs(each - middle) for each in recent])
            found = Jump(loss, middle, deviation, abs(median(self._first)))
        if is_finite:
            least = max(DEVIATIONS * deviation, OF_START * found.start, OF_MEDIAN * abs(middle))
            size = loss - middle
            rests = self._count and step - self._last_step < REST + self._count
            if size <= least or (rests and size < LARGER * self._last_size):
                return None
            limit, self._last_size = middle + least, size
        self._excursion = _Excursion(step, limit)
        self._last_step = step
        self._count += 1
        return found

    def state_dict(self) -> State:
        """What later jumps depend on."""
        return {
            "recent": list(self._recent),
            "first": list(self._first),
            "was_finite": self._was_finite,
            "excursion": None if self._excursion is None else asdict(self._excursion),
            "last": [self._count, self._last_step, self._last_size],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._recent = deque(state["recent"], maxlen=RECENT)
        self._first = list(state["first"])
        self._was_finite = state["was_finite"]
        excursion = state["excursion"]
        self._excursion = None if excursion is None else _Excursion(**excursion)
        self._count, self._last_step, self._last_size = state["last"]
