"""Tracking within a share of the training time."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from gradlens.cockpit.negligible import NegligibleCosts
from gradlens.history.coverage import few, percent
from gradlens.history.spending import Spending, Turns, plain_steps
from gradlens.quantities.quantity import Phase, Quantity
from gradlens.stateful import State

WARM_UP = 2
"""First steps that are not measured, since torch sets up kernels and memory in them."""
SETTLING = 5
"""Untracked steps after a tracked one whose extra time is charged to it. In ``benchmarks.budget``,
caches and the allocator need up to five steps until they are as before."""
AT_MOST = 2.0
"""Time between contexts above this many plain steps isn't charged to tracking: a step and its data
take less, a validation takes more."""
PAUSE = 10
"""Undisturbed steps in a row that are measured before anything is tracked: their median is known to
a few percent, as much as a budget has to tell apart."""
STRETCH = 20
"""Steps after such a pause at which quantities may be tracked, before the next pause. The time of a
plain step changes with the machine's other work, so it has to be measured again and again."""
LONG_STRETCH = 50
"""The same, if tracking everything at each step costs less than the share: then fewer pauses do."""
RECENT = 30
"""Latest undisturbed steps whose median is the time of a plain step: three pauses."""
SAVINGS = 2.0
"""A quantity keeps at most this many times its cost; what it earns above goes to the others."""
LEARNING_RATE = 0.3
"""Weight of the latest measurement in the running mean of a quantity's cost: about the last six
measurements count, so that the mean follows a training run and one disturbed step does little."""
NEGLIGIBLE = 0.5
"""Part of the share that quantities that are never thinned may take together: at least half of it
is left for the others."""


@dataclass
class _Bill:
    """Seconds that a tracked step and the ``SETTLING`` steps after it took above plain steps.

    ``once`` is the part of it that later steps don't cost.
    """

    names: Sequence[str]
    excess: float
    once: float
    settled: int = 0


class Budget:
    """Decides which quantities are tracked, so that it takes at most a share of the training time.

    The time of a step is that from one context to the next. The cost of tracking is the time of a
    tracked step and of the ``SETTLING`` steps after it above the median of undisturbed steps, and
    the time of an untracked step's context at each step.

    The cheapest of the quantities whose own work can be measured (``NegligibleCosts``), up to
    ``NEGLIGIBLE`` of the share, are tracked at each step of their schedules; their time is part of
    that of contexts. Of the Q others each earns (share · time − contexts)/Q. It is tracked at a
    step of its schedule if it has earned what it has paid plus its expected cost; what it can't use
    goes to the others. The cost of a step with several quantities is divided in proportion to their
    expected costs. Quantities without an expected cost are tracked, together with those of the same
    kind, with which they share most of their work, when the mean of what all have paid is earned;
    they divide the cost equally.
    """

    def __init__(
        self,
        share: float,
        quantities: Iterable[Quantity],
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``TypeError`` unless the share is a number, ``ValueError`` unless between 0 and 1."""
        if not isinstance(share, (int, float)):
            raise TypeError(f"budget={share!r}: give the share of training time, such as 0.05")
        if not 0 < share < 1:
            raise ValueError(f"budget={share!r}: give the share of training time, such as 0.05")
        self.share = share
        tracked = tuple(quantities)
        self._kinds = {q.name: _kind(q) for q in tracked}
        self._two_point = {q.name for q in tracked if Phase.AT_NEXT_STEP in q.phases}
        self._accelerator = _accelerator(device)
        self.clock = clock
        self._costs_in_context = NegligibleCosts(tracked)
        self._negligible = self._costs_in_context.within(math.inf)
        self._thinned = self._kinds.keys() - self._negligible
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
        self._context = self._once = 0.0
        self._steps = 0
        self._own = 0.0
        """Seconds of the latest step that negligible quantities have taken."""
        self._least_context = math.inf
        """Seconds of a context in which only negligible quantities are tracked, besides these."""
        self._spent = self._passed = 0.0
        self._turns: Counter[str] = Counter()
        self._scheduled: set[str] = set()
        """Quantities whose schedules have been true at a step."""

    @property
    def latest_step(self) -> int:
        """The step whose context was entered last; 0 before there was one."""
        return self._latest or 0

    @property
    def is_settled(self) -> bool:
        """Whether a pause is over, so that all costs are known."""
        return self._undisturbed == PAUSE

    @property
    def spending(self) -> Spending:
        """The share of the time that tracking has taken, and the turns of thinned quantities."""
        latest = self._chosen.get(self.latest_step, [])
        turns = {
            name: Turns(self._turns[name] + latest.count(name), self._costs.get(name))
            for name in self._kinds
            if name in self._thinned & self._scheduled
        }
        taken = self._spent / self._passed if self._passed else math.nan
        plain = median(self._plain) if self._plain else math.nan
        return Spending(self.share, taken, plain, turns)

    @property
    def without_turns(self) -> str:
        """Which quantities had no turn, and what they cost; empty if all had one."""
        spending = self.spending
        names = [name for name, turns in spending.turns.items() if not turns.count]
        if not names:
            return ""
        if self._steps <= WARM_UP + 1 + PAUSE:
            why = SHORT.format(first=WARM_UP + 1 + PAUSE)
        elif self._context >= self.share * median(self._plain):
            why = CONTEXTS.format(taken=percent(round(spending.taken, 4)))
        else:
            why = SAVING.format(time=plain_steps(self._mean_paid() / median(self._plain)))
        return NO_TURN.format(share=self.share, names=few(names), steps=self._steps, why=why)

    def is_due(self, quantity: Quantity, global_step: int) -> bool:
        """Whether a quantity is tracked at a step: its schedule is true, and it has the means.

        The answer about a step may change until the step before it is over.
        """
        name = quantity.name
        if name in self._negligible:
            return quantity.is_active(global_step)
        has_means = self._is_ready and self._earned >= self._due[name]
        # The answer is no at most steps, so that must be quick.
        if not has_means and name in self._scheduled:
            return False
        if not quantity.is_active(global_step):
            return False
        self._scheduled.add(name)
        chosen = self._chosen.setdefault(global_step, [])
        if name not in chosen and has_means and self._affords(name, global_step):
            chosen.append(name)
        return name in chosen

    def begin_step(self, global_step: int) -> None:
        """A context is entered: the step before is over."""
        now, before = self.clock(), self._latest
        tracked = [] if before is None else self._chosen.get(before, [])
        self._turns.update(tracked)
        if before is not None and not tracked:
            self._context = self._began - self._entered + self._left - self._ended
            if self._own and self._bill is None:
                self._least_context = min(self._least_context, self._context - self._own)
        if self._steps > WARM_UP:
            self._account(self._left - self._entered, now - self._left, tracked, self._once)
        if self.is_settled:
            self._find_negligible(self._most_negligible(median(self._plain)))
        elif before is not None and len(self._plain) < PAUSE:
            latest = now - self._entered
            is_warm = self._steps > WARM_UP
            self._find_negligible(self._most_negligible(latest) if is_warm else self.share * latest)
        if global_step != before:
            self._unfinished = [name for name in tracked if name in self._two_point]
        # Decisions about other steps are void, since these steps didn't come.
        self._chosen = {global_step: self._chosen.get(global_step, [])}
        self._entered = self._began = self._ended = self._left = now
        self._own = 0.0
        self._latest = global_step
        self._steps += 1

    def begin_backward(self) -> None:
        """A context has been entered: the backward pass is about to run."""
        self._began = self.clock()

    def end_backward(self, is_tracked: bool) -> None:
        """A context is about to be left, in which quantities are computed if it is tracked."""
        if is_tracked and self._accelerator is not None:
            # Values wait for the backward pass, whose time is not that of the first of them.
            torch.accelerator.synchronize(self._accelerator)
        self._ended = self.clock()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """A context for the work of a quantity after the backward pass."""
        started = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - started
            self._costs_in_context.measure(name, seconds)
            if name in self._negligible:
                self._own += seconds
                self._turns[name] += 1

    def end_step(self, once: float = 0.0) -> None:
        """A context has been left.

        It has spent ``once`` seconds on what most steps needn't do: that is paid for, but is no
        cost of the next ones.
        """
        self._left, self._once = self.clock(), once

    def state_dict(self) -> State:
        """What was earned and paid, and what is known of the times of steps.

        The latest step is left out, since its end is that of the program.
        """
        return {
            "plain": list(self._plain),
            "undisturbed": self._undisturbed,
            "stretch": self._stretch,
            "since_pause": self._since_pause,
            "costs": dict(self._costs),
            "earned": self._earned,
            "paid": dict(self._paid),
            "due": dict(self._due),
            "is_ready": self._is_ready,
            "bill": None if self._bill is None else asdict(self._bill),
            "context": self._context,
            "negligible": self._costs_in_context.state_dict(),
            "least_context": self._least_context,
            "spent": self._spent,
            "passed": self._passed,
            "turns": dict(self._turns),
            "thinned": sorted(self._thinned),
            "scheduled": sorted(self._scheduled),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, if it is of the same quantities; the first steps are a warm-up.

        With other quantities, the budget begins anew.
        """
        if state["paid"].keys() != self._paid.keys():
            return
        self._plain = deque(state["plain"], maxlen=RECENT)
        self._undisturbed, self._stretch = state["undisturbed"], state["stretch"]
        self._since_pause, self._is_ready = state["since_pause"], state["is_ready"]
        self._costs, self._paid, self._due = map(
            dict, (state["costs"], state["paid"], state["due"])
        )
        self._earned, self._context = state["earned"], state["context"]
        self._bill = None if state["bill"] is None else _Bill(**state["bill"])
        self._chosen, self._latest, self._unfinished, self._steps = {}, None, [], 0
        self._costs_in_context.load_state_dict(state["negligible"])
        self._least_context = state["least_context"]
        self._spent, self._passed = state["spent"], state["passed"]
        self._turns = Counter(state["turns"])
        self._thinned, self._scheduled = {*state["thinned"]}, {*state["scheduled"]}
        self._negligible = frozenset(self._kinds.keys() - self._thinned)

    def _most_negligible(self, plain: float) -> float:
        """Seconds that quantities may take at each step that are never thinned."""
        of_context = 0.0 if math.isinf(self._least_context) else self._least_context
        return NEGLIGIBLE * self.share * plain - of_context

    def _find_negligible(self, most: float) -> None:
        """Find the quantities that are never thinned, which take at most so many seconds a step."""
        before = self._negligible
        self._negligible = self._costs_in_context.within(most)
        self._thinned = self._kinds.keys() - self._negligible
        for name in before - self._negligible:
            self._costs.setdefault(name, self._costs_in_context.of(name))
            self._paid[name] = self._earned + self._expected(name)
        self._due = {name: self._falls_due(name) for name in self._thinned}

    def _account(self, inside: float, outside: float, tracked: Sequence[str], once: float) -> None:
        """Enter a step's seconds inside its context, and until the next one."""
        self._passed += inside + outside
        self._spent += self._context
        self._earned += (self.share * (inside + outside) - self._context) / max(
            len(self._thinned), 1
        )
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
        self._spent += bill.excess
        charges = self._divided(bill.excess, bill.names)
        for name, cost in self._divided(bill.excess - bill.once, bill.names).items():
            self._paid[name] += charges[name]
            known = self._costs.get(name, cost)
            self._costs[name] = known + LEARNING_RATE * (cost - known)
        self._share_surplus()
        costs = sum(self._costs.get(name, 0.0) for name in self._thinned)
        self._stretch = LONG_STRETCH if costs < self.share * median(self._plain) else STRETCH
        self._due = {name: self._falls_due(name) for name in self._thinned}

    def _share_surplus(self) -> None:
        """Divide what quantities have above ``SAVINGS`` times their cost among the others."""
        known = self._thinned & self._costs.keys()
        most = {name: SAVINGS * self._expected(name) for name in known}
        rich = {name: self._earned - self._paid[name] - most[name] for name in most}
        rich = {name: surplus for name, surplus in rich.items() if surplus > 0}
        poor = self._thinned - rich.keys()
        for name in rich if poor else ():
            self._paid[name] += rich[name]
        for name in poor:
            self._paid[name] -= sum(rich.values()) / len(poor)

    def _divided(self, excess: float, names: Sequence[str]) -> dict[str, float]:
        """What each pays of a cost; new quantities pay what exceeds the others' expected costs."""
        known = {name: self._expected(name) for name in names if name in self._costs}
        new = [name for name in names if name not in known]
        expected = sum(known.values())
        if new:
            return known | dict.fromkeys(new, (excess - expected) / len(new))
        if not expected:
            return dict.fromkeys(names, excess / len(names))
        return {name: excess * cost / expected for name, cost in known.items()}

    def _affords(self, name: str, global_step: int) -> bool:
        """Whether a quantity can pay for itself besides those that are tracked already."""
        unpaid = self._unpaid(global_step)
        if name in self._costs:
            return self._earned >= self._due[name] + self._expected(name) * unpaid.count(name)
        # A new cost can be measured beside known ones, and be divided among those of its kind.
        new = [n for n in self._chosen.get(global_step, []) if n not in self._costs]
        return not unpaid and all(self._kinds[n] == self._kinds[name] for n in new)

    def _falls_due(self, name: str) -> float:
        """What a quantity must have earned before it is tracked."""
        if name in self._costs:
            return self._paid[name] + self._expected(name)
        return self._mean_paid()

    def _mean_paid(self) -> float:
        return sum(self._paid[name] for name in self._thinned) / len(self._thinned)

    def _expected(self, name: str) -> float:
        # The measured cost of a cheap quantity may be negative.
        return max(self._costs[name], 0.0)

    def _unpaid(self, global_step: int) -> list[str]:
        """Quantities tracked at earlier steps whose cost isn't measured yet."""
        others = [names for step, names in self._chosen.items() if step != global_step]
        return [*(self._bill.names if self._bill else ()), *(n for names in others for n in names)]


NO_TURN = "budget={share} wasn't enough to track {names} in {steps} steps: {why}"
SHORT = (
    "the first {first} steps are measured before a quantity with a notable cost is tracked. Don't "
    "use a budget for short runs"
)
CONTEXTS = (
    "contexts, and the quantities that are tracked at each step of their schedules, take {taken} "
    "of the time. Steps are too short for this budget"
)
SAVING = (
    "what a quantity costs is measured when it is tracked for the first time. That happens for one "
    "kind of quantities after another, each as soon as its part of the budget is as large as what "
    "the others have cost on average, {time}. Use a larger budget, or fewer quantities"
)


def _accelerator(device: torch.device | None) -> torch.device | None:
    """A device that runs beside the processor; ``None`` for the processor itself."""
    found = torch.accelerator.current_accelerator()
    is_one = device is not None and found is not None and device.type == found.type
    return device if is_one else None


def _kind(quantity: Quantity) -> Hashable:
    if Phase.BEFORE_BACKWARD in quantity.phases:
        return quantity.name
    return bool(quantity.layer_requests), quantity.of_samples
