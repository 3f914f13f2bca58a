"""Track schedules: functions from the global step to whether to track at this step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np

from gradlens.stateful import load_state, state_of

Schedule: TypeAlias = Callable[[int], bool]
"""Any callable from the global step to whether to track at this step."""

KEPT_DECISIONS = 4
"""Latest decisions that are kept: for the steps around the present one, since schedules are called
ahead of time."""

LARGEST_STEP = 2**62
"""Steps are stored as integers of 64 bits; rounding must not take a point beyond them."""


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
    """True at ``steps`` points from base^start to base^end, and at step 0 if ``init``."""

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
"""The schedule that is true at every step."""


class _DecidedOnce:
    """Calls a schedule once for each step, so that a random one is consistent."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._decisions: dict[int, bool] = {}

    def __call__(self, global_step: int) -> bool:
        if global_step not in self._decisions:
            if len(self._decisions) == KEPT_DECISIONS:
                self._decisions.pop(next(iter(self._decisions)))
            self._decisions[global_step] = _decision(self._schedule(global_step))
        return self._decisions[global_step]

    def __repr__(self) -> str:
        return repr(self._schedule)

    def state_dict(self) -> dict[str, Any]:
        """The decisions, also those on steps to come, and the state of the schedule."""
        return {"decisions": dict(self._decisions), "schedule": state_of(self._schedule)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._decisions = dict(state["decisions"])
        load_state(self._schedule, state["schedule"])


def _decision(found: Any) -> bool:
    """What a schedule has returned, which may be a bool of numpy or torch; else ``TypeError``."""
    if isinstance(found, bool) or str(getattr(found, "dtype", "")) in ("bool", "torch.bool"):
        return bool(found)
    kind = "None" if found is None else f"an object of type {type(found).__name__}"
    raise TypeError(
        f"it returns {kind}, which doesn't say whether to track: return True or False, as "
        "lambda step: step % 10 == 0 does"
    )


def checked(schedule: Any, owner: str) -> Schedule:
    """The schedule of a function, or of a number K for every K steps.

    A function is called once for each of the last ``KEPT_DECISIONS`` steps.

    ``TypeError`` names the owner if it is neither, and ``ValueError`` if K is less than one.
    """
    if isinstance(schedule, int) and not isinstance(schedule, bool):
        if schedule < 1:
            raise ValueError(f"{owner}: track_schedule={schedule} tracks nothing: use 1 or more")
        return Linear(schedule)
    if not _takes_a_step(schedule):
        raise TypeError(
            f"{owner}: track_schedule={schedule!r} is not callable with a step alone: pass a "
            "number of steps, or a function from the global step to a bool"
        )
    if schedule is linear:
        raise TypeError(
            f"{owner}: track_schedule=linear makes schedules and is none itself: call it, as in "
            "gradlens.schedules.linear(10)"
        )
    return _DecidedOnce(schedule)


def _takes_a_step(schedule: object) -> bool:
    if not callable(schedule):
        return False
    try:
        inspect.signature(schedule).bind(0)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True


def linear(interval: int, offset: int = 0) -> Linear:
    """Track every ``interval`` steps from step ``offset`` on.

    ``ValueError`` for less than one, ``TypeError`` for numbers that aren't whole.
    """
    _check_whole(interval=interval, offset=offset)
    if interval < 1:
        raise ValueError(f"interval={interval} tracks nothing: use 1 or more")
    return Linear(interval, offset)


def epochs(interval: int, length: int, offset: int = 0) -> Epochs:
    """Track all steps of every ``interval``-th epoch, from epoch ``offset`` on.

    Epochs have ``length`` steps. ``ValueError`` for less than one, ``TypeError`` for numbers that
    aren't whole.
    """
    _check_whole(interval=interval, length=length, offset=offset)
    if interval < 1 or length < 1:
        raise ValueError(f"interval={interval}, length={length} track nothing: use 1 or more")
    return Epochs(interval, length, offset)


def logarithmic(
    start: float, end: float, steps: int = 300, base: float = 10.0, init: bool = True
) -> Logarithmic:
    """Track at ``steps`` points that are evenly spaced in the logarithm of the step.

    ``start`` and ``end`` are exponents of ``base``. Points are rounded down to whole steps, so that
    there may be fewer steps than points. ``init`` adds step 0. The defaults are those of
    cockpit-for-pytorch. ``ValueError`` if there are no points, or steps among them that no run has.
    """
    _check_whole(steps=steps)
    if steps < 1:
        raise ValueError(f"steps={steps} tracks nothing: use 1 or more")
    if base <= 1 or max(start, end) > math.log(LARGEST_STEP, base):
        raise ValueError(
            f"start={start}, end={end} are exponents of base={base}, and no run has so many steps: "
            "logarithmic(0, 4) is from step 1 to step 10,000"
        )
    return Logarithmic(start, end, steps, base, init)


def _check_whole(**numbers: object) -> None:
    for name, number in numbers.items():
        if not isinstance(number, Integral):
            raise TypeError(f"{name}={number!r} is not a whole number: pass an int")
