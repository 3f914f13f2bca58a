"""Track schedules: from a global step to whether to track at it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

Schedule: TypeAlias = Callable[[int], bool]
"""Any callable from ``global_step`` to whether to track."""


REMEMBERED = 4
"""Decisions that are kept: those about steps that may come next are asked for ahead of time."""


@dataclass(frozen=True)
class Linear:
    """True at ``offset``, ``offset + interval``, ``offset + 2·interval``, ..."""

    interval: int
    offset: int = 0

    def __call__(self, global_step: int) -> bool:
        since = global_step - self.offset
        return since >= 0 and since % self.interval == 0


@dataclass(frozen=True)
class Logarithmic:
    """True at ``steps`` points between base^start and base^end, and at 0 if ``init``."""

    start: float
    end: float
    steps: int = 300
    base: float = 10.0
    init: bool = True
    _points: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        points = np.logspace(self.start, self.end, self.steps, base=self.base).astype(int)
        first = {0} if self.init else set()
        object.__setattr__(self, "_points", frozenset(points.tolist()) | first)

    def __call__(self, global_step: int) -> bool:
        return global_step in self._points


@dataclass(frozen=True)
class Epochs:
    """True at all steps of epochs ``offset``, ``offset + interval``, ... of ``length`` steps."""

    interval: int
    length: int
    offset: int = 0

    def __call__(self, global_step: int) -> bool:
        return Linear(self.interval, self.offset)(global_step // self.length)


EVERY_STEP = Linear(1)


class _DecidedOnce:
    """Asks a schedule once for each step, so that a random one has one answer."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._decisions: dict[int, bool] = {}

    def __call__(self, global_step: int) -> bool:
        if global_step not in self._decisions:
            if len(self._decisions) == REMEMBERED:
                self._decisions.pop(next(iter(self._decisions)))
            self._decisions[global_step] = bool(self._schedule(global_step))
        return self._decisions[global_step]

    def __repr__(self) -> str:
        return repr(self._schedule)


def decided_once(schedule: Schedule) -> Schedule:
    """The same schedule, with one answer for each of the last few steps that it is asked about."""
    return _DecidedOnce(schedule)


def checked(schedule: Schedule, owner: str) -> Schedule:
    """As ``decided_once``; ``TypeError`` names the owner of what is not callable."""
    if not callable(schedule):
        raise TypeError(
            f"{owner}: track_schedule={schedule!r} is not callable: pass a function from the "
            "global step to a bool, such as gradlens.schedules.linear(10)"
        )
    return decided_once(schedule)


def linear(interval: int, offset: int = 0) -> Linear:
    """Track every ``interval`` steps, starting with step ``offset``."""
    if interval < 1:
        raise ValueError(f"interval={interval} tracks nothing: use 1 or more")
    return Linear(interval, offset)


def epochs(interval: int, length: int, offset: int = 0) -> Epochs:
    """Track all steps of every ``interval``-th epoch; epochs have ``length`` steps."""
    if interval < 1 or length < 1:
        raise ValueError(f"interval={interval}, length={length} track nothing: use 1 or more")
    return Epochs(interval, length, offset)


def logarithmic(
    start: float, end: float, steps: int = 300, base: float = 10.0, init: bool = True
) -> Logarithmic:
    """Track at ``steps`` points spaced evenly in the logarithm of the step.

    ``start`` and ``end`` are exponents of ``base``; points are rounded down to whole steps, and
    where several fall together one is left. ``init`` adds step 0.
    """
    return Logarithmic(start, end, steps, base, init)
