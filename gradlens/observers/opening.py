"""Measures what tracking costs, and sums up the first steps of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from gradlens.diagnosis.opening import opening
from gradlens.history.records import Spending
from gradlens.observers.observer import Observer, Outcome, Records, StepContext
from gradlens.stateful import State

AFTER = 50
"""Steps after which it is said: most of what a run says at all can be seen by then, and a user
still watches. A budget says its own by the same step."""
WARM_UP = 2
"""First steps that aren't measured: torch sets up kernels and memory in them, and gradlens finds
whose rows are whose."""
FEWEST = 5
"""Steps without tracking whose median is taken for the time of a plain step."""


@dataclass(frozen=True)
class _Times:
    """Seconds of a step: all of it, those of gradlens outside of the backward pass, and those
    between entering the context and leaving it, where that runs."""

    whole: float
    own: float
    inside: float
    is_look: bool


class Opening(Observer):
    """Says in four lines what the first fifty steps have shown (``diagnosis/opening.py``), once.

    ``own_seconds`` is the time that gradlens has worked so far, but for that in the backward pass.
    Where some steps aren't tracked, they tell that, too; where all are, it is between nothing and
    the time of the backward pass. Under a budget, which knows better, nothing is measured.
    """

    work = "summing up the first steps"

    def __init__(
        self,
        records: Records,
        own_seconds: Callable[[], float] | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._records = records
        self._own_seconds = own_seconds
        self._clock = clock
        self._step: int | None = None
        self._steps = 0
        self._times: list[_Times] = []
        self._entered = self._own = self._inside = self._since = 0.0
        self._is_look = self._is_said = False

    def enter(self, context: StepContext) -> None:
        """Another step begins, or the next part of the same one."""
        if self._is_said:
            return
        now = self._since = self._clock()
        if context.global_step == self._step:
            return
        own = 0.0 if self._own_seconds is None else self._own_seconds()
        if self._steps > WARM_UP:
            whole = now - self._entered
            self._times.append(_Times(whole, own - self._own, self._inside, self._is_look))
        self._entered, self._own, self._inside, self._is_look = now, own, 0.0, False
        self._step = context.global_step
        self._steps += 1

    def skip(self) -> None:
        """A step without a look."""
        self._steps += 1
        if self._steps > AFTER and not self._is_said:
            self._say()

    def leave(self, context: StepContext, outcome: Outcome) -> None:
        """Sum up when there are enough steps."""
        if self._is_said or outcome.error is not None:
            return
        self._inside += self._clock() - self._since
        self._is_look |= outcome.step is not None
        if self._steps > AFTER and not context.accumulating:
            if self._own_seconds is not None and any(each.whole for each in self._times):
                self._records.take_in(context.global_step, "spending", spending(self._times))
            self._say()

    def state_dict(self) -> State:
        """How many steps there were, and whether it was said; a program measures its own times."""
        return {"steps": self._steps, "is_said": self._is_said}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._steps, self._is_said = state["steps"], state["is_said"]

    def _say(self) -> None:
        self._is_said = True
        for line in opening(self._records.history):
            self._records.say(line)


def spending(times: list[_Times]) -> Spending:
    """What tracking has taken of the time of some steps."""
    whole = sum(each.whole for each in times)
    looks = [each for each in times if each.is_look]
    plain = [each.whole - each.own for each in times if not each.is_look]
    own = sum(each.own for each in times)
    if looks and len(plain) < FEWEST:
        most = min(own + sum(each.inside for each in looks), whole)
        return Spending(math.nan, own / whole, at_most=most / whole)
    step = median(plain)
    extra = [max(each.whole - step, each.own) for each in looks]
    taken = sum(extra) + sum(each.own for each in times if not each.is_look)
    return Spending(math.nan, taken / whole, step, median(extra) if extra else math.nan)
