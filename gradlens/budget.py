"""Tracking within a share of the training time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from gradlens.quantities.quantity import Quantity, TwoPointQuantity
from gradlens.schedules import Schedule, decided_once

WARM_UP = 2
"""Steps that are not measured: the first ones are slower."""
BASELINE = 5
"""Untracked steps that must be known before anything is tracked."""
RECENT = 50
"""Latest untracked steps whose median is the time of a plain step."""
LEARNING_RATE = 0.3
"""How fast the estimate of a quantity's cost follows what is measured."""


class Budget:
    """Thins schedules so that tracking takes at most a share of the training time.

    A step's time is that from one context to the next, and the excess over the median of untracked
    steps is what tracking has cost. Each quantity earns the same part of the share as training goes
    on. It is tracked at a step of its schedule as soon as it can pay for itself, and the first time
    as soon as all together have no debt, which tells what it costs. An excess of several quantities
    is divided by what each was expected to cost.
    """

    def __init__(
        self,
        share: float,
        quantities: Iterable[Quantity],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``ValueError`` unless the share is between 0 and 1."""
        if not 0 < share < 1:
            raise ValueError(f"budget={share!r}: give the share of training time, such as 0.05")
        self.share = share
        self._quantities = tuple(quantities)
        self._clock = clock
        self._plain: deque[float] = deque(maxlen=RECENT)
        self._costs: dict[str, float] = {}
        self._credits = dict.fromkeys((q.name for q in self._quantities), 0.0)
        self._chosen: dict[int, list[str]] = {}
        self._latest: int | None = None
        self._unfinished: list[str] = []
        self._entered: float | None = None
        self._steps = 0
        self._schedules: dict[str, Schedule] = {}
        for quantity in self._quantities:
            self._schedules[quantity.name] = quantity.track_schedule
            quantity.track_schedule = decided_once(self._thinned(quantity))

    def begin_step(self, global_step: int, after_a_look: bool = False) -> None:
        """A context is entered: the step before is over.

        ``after_a_look`` says that it has done what most steps needn't: it is paid for, but tells
        nothing about the next ones.
        """
        now, before = self._clock(), self._latest
        tracked = [] if before is None else self._chosen.get(before, [])
        if self._entered is not None and self._steps > WARM_UP:
            names = [*dict.fromkeys([*tracked, *self._unfinished])]
            self._account(now - self._entered, names, learn=not after_a_look)
        if global_step != before:
            two_point = {q.name for q in self._quantities if isinstance(q, TwoPointQuantity)}
            self._unfinished = [name for name in tracked if name in two_point]
            # Decisions about steps to come may have been asked for already.
            self._chosen = {s: names for s, names in self._chosen.items() if s != before}
        self._entered, self._latest = now, global_step
        self._steps += 1

    def restore(self) -> None:
        """Give the quantities their own schedules back."""
        for quantity in self._quantities:
            quantity.track_schedule = self._schedules[quantity.name]

    def _account(self, seconds: float, tracked: Sequence[str], learn: bool) -> None:
        if not tracked:
            self._plain.append(seconds)
        excess = seconds - median(self._plain) if tracked else 0.0
        income = self.share * seconds / len(self._credits)
        for name in self._credits:
            self._credits[name] += income
        for name, charge in self._charges(tracked, excess).items():
            self._credits[name] -= charge
            if not learn:
                continue
            known = self._costs.get(name, max(charge, 0.0))
            self._costs[name] = known + LEARNING_RATE * (max(charge, 0.0) - known)

    def _charges(self, tracked: Sequence[str], excess: float) -> dict[str, float]:
        """What each pays of an excess; who is new pays what the others were not expected to."""
        known = {name: self._costs[name] for name in tracked if name in self._costs}
        new = [name for name in tracked if name not in known]
        expected = sum(known.values())
        if new:
            return known | dict.fromkeys(new, (excess - expected) / len(new))
        if not expected:
            return dict.fromkeys(tracked, excess / len(tracked)) if tracked else {}
        return {name: excess * cost / expected for name, cost in known.items()}

    def _thinned(self, quantity: Quantity) -> Schedule:
        scheduled = quantity.track_schedule

        def schedule(global_step: int) -> bool:
            companions = self._chosen.setdefault(global_step, [])
            chosen = bool(scheduled(global_step)) and self._affords(quantity.name, companions)
            if chosen:
                companions.append(quantity.name)
            return chosen

        return schedule

    def _affords(self, name: str, companions: Sequence[str]) -> bool:
        if len(self._plain) < BASELINE:
            return False
        if name in self._costs:
            return self._credits[name] >= self._costs[name]
        # Its cost shows beside those that are known, but not beside another new one's.
        others = all(companion in self._costs for companion in companions)
        return others and sum(self._credits.values()) >= 0
