"""Tracking within a share of the training time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.quantities.quantity import (
    CurvatureQuantity,
    GradientCurvatureQuantity,
    Quantity,
    TwoPointQuantity,
)
from gradlens.schedules import Schedule, decided_once

WARM_UP = 2
"""Steps that are not measured: the first ones are slower."""
SETTLING = 5
"""Untracked steps after a tracked one that may still be slower, as caches and memory are."""
BASELINE = 5
"""Undisturbed steps that must be known before anything is tracked."""
RECENT = 50
"""Latest undisturbed steps whose median is the time of a plain step."""
PAUSE = 10
"""Undisturbed steps in a row after which tracking goes on for ``RECENT`` steps."""
LEARNING_RATE = 0.3
"""How fast the estimate of a quantity's cost follows what is measured."""


@dataclass
class _Bill:
    """What a tracked step, and those that it disturbs, have taken longer than others."""

    names: Sequence[str]
    excess: float
    tells_costs: bool
    settled: int = 0


class Budget:
    """Thins schedules so that tracking takes at most a share of the training time.

    A step's time is that from one context to the next. What a tracked step and the few after it
    take above the median of undisturbed ones is what tracking has cost. Each quantity earns the
    same part of the share as training goes on, and is tracked at a step of its schedule as soon as
    it can pay for itself. A bill of several quantities is divided by what each was expected to
    cost. The first time, quantities of a kind, which share most of their work, are tracked together
    as soon as nobody has debts, and divide the bill equally; so they stay together.
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
        self._kinds = {q.name: _kind(q) for q in self._quantities}
        self.clock = clock
        self._plain: deque[float] = deque(maxlen=RECENT)
        self._undisturbed = 0
        self._since_pause = 0
        self._costs: dict[str, float] = {}
        self._earned = 0.0
        self._paid = dict.fromkeys(self._kinds, 0.0)
        self._chosen: dict[int, list[str]] = {}
        self._bill: _Bill | None = None
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
        now, before = self.clock(), self._latest
        tracked = [] if before is None else self._chosen.get(before, [])
        if self._entered is not None and self._steps > WARM_UP:
            self._account(now - self._entered, tracked, tells_costs=not after_a_look)
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

    def _account(self, seconds: float, tracked: Sequence[str], tells_costs: bool) -> None:
        """Enter a step's time."""
        self._earned += self.share * seconds / len(self._paid)
        if tracked:
            self._pay()
            names = [*dict.fromkeys([*tracked, *self._unfinished])]
            self._bill = _Bill(names, seconds - median(self._plain), tells_costs)
        elif self._bill is not None:
            self._bill.excess += seconds - median(self._plain)
            self._bill.settled += 1
        else:
            self._plain.append(seconds)
        self._undisturbed = self._undisturbed + 1 if self._bill is None else 0
        self._since_pause = 0 if self._undisturbed >= PAUSE else self._since_pause + 1
        if self._bill is not None and self._bill.settled == SETTLING:
            self._pay()

    def _pay(self) -> None:
        bill, self._bill = self._bill, None
        if bill is None:
            return
        for name, charge in self._charges(bill).items():
            self._paid[name] += charge
            if bill.tells_costs:
                known = self._costs.get(name, charge)
                self._costs[name] = known + LEARNING_RATE * (charge - known)

    def _charges(self, bill: _Bill) -> dict[str, float]:
        """What each pays of a bill; who is new pays what the others were not expected to."""
        known = {name: self._expected(name) for name in bill.names if name in self._costs}
        new = [name for name in bill.names if name not in known]
        expected = sum(known.values())
        if new:
            return known | dict.fromkeys(new, (bill.excess - expected) / len(new))
        if not expected:
            return dict.fromkeys(bill.names, bill.excess / len(bill.names))
        return {name: bill.excess * cost / expected for name, cost in known.items()}

    def _thinned(self, quantity: Quantity) -> Schedule:
        scheduled = quantity.track_schedule

        def schedule(global_step: int) -> bool:
            companions = self._chosen.setdefault(global_step, [])
            chosen = bool(scheduled(global_step)) and self._affords(quantity.name, global_step)
            if chosen:
                companions.append(quantity.name)
            return chosen

        return schedule

    def _affords(self, name: str, global_step: int) -> bool:
        if len(self._plain) < BASELINE or self._since_pause > RECENT:
            return False
        unpaid = self._unpaid(global_step)
        if name in self._costs:
            credit = self._earned - self._paid[name]
            return credit >= self._expected(name) * (1 + unpaid.count(name))
        # Its cost shows beside those that are known, and divided among new ones of its kind.
        new = [n for n in self._chosen[global_step] if n not in self._costs]
        alike = all(self._kinds[n] == self._kinds[name] for n in new)
        solvent = self._earned * len(self._paid) >= sum(self._paid.values())
        return alike and not unpaid and solvent

    def _expected(self, name: str) -> float:
        # What is cheap seems to cost less than nothing now and then.
        return max(self._costs[name], 0.0)

    def _unpaid(self, global_step: int) -> list[str]:
        """Who is tracked at earlier steps whose bill is still to come."""
        others = [names for step, names in self._chosen.items() if step != global_step]
        return [*(self._bill.names if self._bill else ()), *(n for names in others for n in names)]


def _kind(quantity: Quantity) -> Hashable:
    if isinstance(quantity, (CurvatureQuantity, GradientCurvatureQuantity)):
        return quantity.name
    return isinstance(quantity, LayerQuantity), quantity.of_samples
