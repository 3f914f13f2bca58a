"""Tracking within a share of the training time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.quantities.quantity import CurvedQuantity, Quantity, TwoPointQuantity
from gradlens.schedules import Schedule, decided_once

WARM_UP = 2
"""Steps that are not measured: the first ones are slower."""
SETTLING = 5
"""Untracked steps after a tracked one that may still be slower, as caches and memory are."""
AT_MOST = 2.0
"""Plain steps that tracking is held to account for between two contexts: what takes longer there is
something else, such as a validation."""
PAUSE = 10
"""Undisturbed steps in a row that must have been seen before anything is tracked."""
STRETCH = 20
"""Steps after such a pause at which something may be tracked, until the next one: what a plain
step takes changes with the machine's other work."""
LONG_STRETCH = 50
"""The same, where tracking everything at each step costs less than the share."""
RECENT = 30
"""Latest undisturbed steps whose median is the time of a plain step."""
SAVINGS = 2.0
"""Times its cost that a quantity may save; what it earns above that goes to the others."""
LEARNING_RATE = 0.3
"""How fast the estimate of a quantity's cost follows what is measured."""


@dataclass
class _Bill:
    """What a tracked step, and those that it disturbs, have taken longer than others.

    ``once`` is the part of it that is no cost of later steps.
    """

    names: Sequence[str]
    excess: float
    once: float
    settled: int = 0


class Budget:
    """Thins schedules so that tracking takes at most a share of the training time.

    A step's time is that from one context to the next. What a tracked step and the few after it
    take above the median of undisturbed ones is what tracking has cost, besides what an untracked
    step's context takes at each. Each quantity earns the same part of the rest of the share as
    training goes on, and is tracked at a step of its schedule as soon as it can pay for itself;
    what it can't use goes to the others. A bill of several quantities is divided by what each was
    expected to cost. The first time, quantities of a kind, which share
    most of their work, are tracked together as soon as nobody has debts, and divide the bill
    equally; so they stay together.
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
        self._two_point = {q.name for q in self._quantities if isinstance(q, TwoPointQuantity)}
        self.clock = clock
        self._plain: deque[float] = deque(maxlen=RECENT)
        self._undisturbed = 0
        self._stretch = STRETCH
        self._since_pause = STRETCH + 1
        self._costs: dict[str, float] = {}
        self._earned = 0.0
        self._paid = dict.fromkeys(self._kinds, 0.0)
        self._due = dict.fromkeys(self._kinds, 0.0)
        self._is_ready = False
        self._chosen: dict[int, list[str]] = {}
        self._bill: _Bill | None = None
        self._latest: int | None = None
        self._unfinished: list[str] = []
        self._entered = self._began = self._ended = self._left = 0.0
        self._context = 0.0
        self._steps = 0
        self._schedules: dict[str, Schedule] = {}
        for quantity in self._quantities:
            self._schedules[quantity.name] = quantity.track_schedule
            quantity.track_schedule = decided_once(self._thinned(quantity))

    @property
    def has_means(self) -> bool:
        """Whether anybody could be tracked at the step to come."""
        return self._is_ready and self._earned >= min(self._due.values())

    def begin_step(self, global_step: int, once: float = 0.0) -> None:
        """A context is entered: the step before is over.

        It has spent ``once`` seconds on what most steps needn't do: that is paid for, but is no
        cost of the next ones.
        """
        now, before = self.clock(), self._latest
        tracked = [] if before is None else self._chosen.get(before, [])
        if self._steps > WARM_UP:
            if not tracked:
                self._context = self._began - self._entered + self._left - self._ended
            self._account(self._left - self._entered, now - self._left, tracked, once)
        if global_step != before:
            self._unfinished = [name for name in tracked if name in self._two_point]
        # What was decided about other steps was in vain: they didn't come.
        self._chosen = {global_step: self._chosen.get(global_step, [])}
        self._entered = self._began = self._ended = self._left = now
        self._latest = global_step
        self._steps += 1

    def begin_backward(self) -> None:
        """A context has been entered: what comes is the user's."""
        self._began = self.clock()

    def end_backward(self) -> None:
        """A context is about to be left."""
        self._ended = self.clock()

    def end_step(self) -> None:
        """A context has been left."""
        self._left = self.clock()

    def restore(self) -> None:
        """Give the quantities their own schedules back."""
        for quantity in self._quantities:
            quantity.track_schedule = self._schedules[quantity.name]

    def _account(self, inside: float, outside: float, tracked: Sequence[str], once: float) -> None:
        """Enter a step's seconds inside its context, and until the next one."""
        self._earned += (self.share * (inside + outside) - self._context) / len(self._paid)
        if tracked:
            self._pay()
            names = [*dict.fromkeys([*tracked, *self._unfinished])]
            self._bill = _Bill(names, self._excess(inside, outside), once)
        elif self._bill is not None:
            self._bill.excess += self._excess(inside, outside)
            self._bill.settled += 1
        else:
            self._plain.append(inside + outside)
        self._undisturbed = self._undisturbed + 1 if self._bill is None else 0
        self._since_pause = 0 if self._undisturbed >= PAUSE else self._since_pause + 1
        if self._bill is not None and self._bill.settled == SETTLING:
            self._pay()
        self._is_ready = self._since_pause <= self._stretch

    def _excess(self, inside: float, outside: float) -> float:
        plain = median(self._plain)
        return inside + min(outside, AT_MOST * plain) - plain

    def _pay(self) -> None:
        bill, self._bill = self._bill, None
        if bill is None:
            return
        charges = self._divided(bill.excess, bill.names)
        for name, cost in self._divided(bill.excess - bill.once, bill.names).items():
            self._paid[name] += charges[name]
            known = self._costs.get(name, cost)
            self._costs[name] = known + LEARNING_RATE * (cost - known)
        self._share_surplus()
        is_cheap = sum(self._costs.values()) < self.share * median(self._plain)
        self._stretch = LONG_STRETCH if is_cheap else STRETCH
        self._due = {name: self._falls_due(name) for name in self._due}

    def _share_surplus(self) -> None:
        """Who is tracked whenever its schedule says so needs no more."""
        most = {name: SAVINGS * self._expected(name) for name in self._costs}
        rich = {name: self._earned - self._paid[name] - most[name] for name in most}
        rich = {name: surplus for name, surplus in rich.items() if surplus > 0}
        poor = self._paid.keys() - rich.keys()
        for name in rich if poor else ():
            self._paid[name] += rich[name]
        for name in poor:
            self._paid[name] -= sum(rich.values()) / len(poor)

    def _divided(self, excess: float, names: Sequence[str]) -> dict[str, float]:
        """What each pays of a bill; who is new pays what the others were not expected to."""
        known = {name: self._expected(name) for name in names if name in self._costs}
        new = [name for name in names if name not in known]
        expected = sum(known.values())
        if new:
            return known | dict.fromkeys(new, (excess - expected) / len(new))
        if not expected:
            return dict.fromkeys(names, excess / len(names))
        return {name: excess * cost / expected for name, cost in known.items()}

    def _thinned(self, quantity: Quantity) -> Schedule:
        scheduled, name = quantity.track_schedule, quantity.name

        def schedule(global_step: int) -> bool:
            # Most steps are asked about in vain, so that must be quick.
            if not self._is_ready or self._earned < self._due[name]:
                return False
            chosen = bool(scheduled(global_step)) and self._affords(name, global_step)
            if chosen:
                self._chosen.setdefault(global_step, []).append(name)
            return chosen

        return schedule

    def _affords(self, name: str, global_step: int) -> bool:
        """Whether who can pay for itself can do so beside those that are chosen already."""
        unpaid = self._unpaid(global_step)
        if name in self._costs:
            return self._earned >= self._due[name] + self._expected(name) * unpaid.count(name)
        # Its cost shows beside those that are known, and divided among new ones of its kind.
        new = [n for n in self._chosen.get(global_step, []) if n not in self._costs]
        return not unpaid and all(self._kinds[n] == self._kinds[name] for n in new)

    def _falls_due(self, name: str) -> float:
        """What each must have earned before a quantity is tracked."""
        if name in self._costs:
            return self._paid[name] + self._expected(name)
        return sum(self._paid.values()) / len(self._paid)

    def _expected(self, name: str) -> float:
        # What is cheap seems to cost less than nothing now and then.
        return max(self._costs[name], 0.0)

    def _unpaid(self, global_step: int) -> list[str]:
        """Who is tracked at earlier steps whose bill is still to come."""
        others = [names for step, names in self._chosen.items() if step != global_step]
        return [*(self._bill.names if self._bill else ()), *(n for names in others for n in names)]


def _kind(quantity: Quantity) -> Hashable:
    if isinstance(quantity, CurvedQuantity):
        return quantity.name
    return isinstance(quantity, LayerQuantity), quantity.of_samples
