"""Tracking within a share of the training time: a token bucket."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from gradlens.history.coverage import few, percent
from gradlens.history.spending import Spending, plain_steps
from gradlens.stateful import State

WARM_UP = 2
"""First steps that are not measured, since torch sets up kernels and memory in them."""
PLAIN = 8
"""Further steps without tracking before the first one with it: their median is the time of a plain
step, to a few percent."""
RECENT = 30
"""Latest steps without tracking whose median is the time of a plain step."""
SETTLING = 5
"""Steps after a look whose extra time is charged to it. In ``benchmarks.budget``, caches and the
allocator need up to five steps until they are as before."""
AT_MOST = 2.0
"""Time between contexts of more than this many plain steps isn't charged to tracking: a step and
its data take less, a validation takes more."""
SAVINGS = 2.0
"""Means are saved up to this many times the cost of what they are for; more would be spent at once
after a long time without a scheduled step."""
LEARNING_RATE = 0.3
"""Weight of the latest measurement in the running mean of a cost: about the last six measurements
count, so that the mean follows a training run and one disturbed step does little."""
SAID_AFTER = 50
"""Steps after which it is said that a share pays for no look."""
TOO_RARE = 1000
"""Steps in which a share must pay for one look at least, or it pays for none."""


@dataclass
class _Bill:
    """Seconds that a look, and the steps after it, took above plain steps.

    ``once`` is the part of it that later looks don't cost.
    """

    excess: float
    once: float
    settled: int = 0


class Budget:
    """Decides at which steps there is a look, so that looks take at most a share of the time.

    At a look, all that is scheduled at its step is tracked, and the facts of the step are recorded;
    at all other steps, nothing is. The time of a step is that from one context to the next. Each
    step earns the share of its time, and pays for its context. A look pays what its step, and the
    ``SETTLING`` steps after it, have taken above the median of plain steps. The next one comes when
    the means reach the mean cost. The first one comes in advance, since nothing else tells its
    cost.
    """

    def __init__(
        self,
        share: float,
        names: Collection[str],
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``names`` are those of the quantities; ``ValueError`` unless 0 < ``share`` < 1."""
        if not isinstance(share, (int, float)) or not 0 < share < 1:
            raise ValueError(f"budget={share!r}: give the share of training time, such as 0.05")
        self.share = share
        self.clock = clock
        self._accelerator = _accelerator(device)
        self._names = tuple(names)
        self._means = 0.0
        self._cost: float | None = None
        self._plain: deque[float] = deque(maxlen=RECENT)
        self._outside: deque[float] = deque(maxlen=RECENT)
        self._bill: _Bill | None = None
        self._decided: dict[int, bool] = {}
        self._is_look = False
        self._turns: Counter[str] = Counter()
        self._context = math.nan
        self._spent = self._passed = 0.0
        self._steps = self._measured = 0
        self._latest: int | None = None
        self._entered = self._began = self._ended = self._left = self._once = 0.0

    @property
    def latest_step(self) -> int:
        """The step whose context was entered last; 0 before there was one."""
        return self._latest or 0

    @property
    def spending(self) -> Spending:
        """The share of the time that tracking has taken, and the turns of the quantities."""
        taken = self._spent / self._passed if self._passed else math.nan
        turns = {name: self._turns[name] for name in self._names}
        cost = math.nan if self._cost is None else self._cost
        return Spending(self.share, taken, self._plain_time, cost, turns)

    @property
    def _plain_time(self) -> float:
        return median(self._plain) if self._plain else math.nan

    def has_means(self, global_step: int) -> bool:
        """Whether a step may be a look; decided once for each step that may come next."""
        if global_step not in self._decided:
            is_ready = self._bill is None and self._measured >= WARM_UP + PLAIN
            has_means = self._cost is None or self._means >= self._cost
            self._decided[global_step] = is_ready and not self._is_look and has_means
        return self._decided[global_step]

    # The times of a step, in their order.

    def begin_step(self, global_step: int) -> bool:
        """A context is entered; whether what was tracked has been paid for by the step before."""
        now, before = self.clock(), self._latest
        has_paid = False
        if self._measured >= WARM_UP:
            has_paid = self._account(self._left - self._entered, now - self._left)
        if global_step != before:
            self._decided = {n: d for n, d in self._decided.items() if n == global_step}
            self._is_look = False
        self._entered = self._began = self._ended = self._left = now
        self._latest = global_step
        self._steps += 1
        self._measured += 1
        return has_paid

    def begin_backward(self) -> None:
        """A context has been entered: the backward pass is about to run."""
        self._began = self.clock()

    def end_backward(self, names: Collection[str]) -> None:
        """A context is about to be left, in which quantities of these names are computed."""
        self._turns.update(names)
        self._is_look |= bool(names or not self._names) and self.has_means(self.latest_step)
        if names and self._accelerator is not None:
            # Values wait for the backward pass, whose time is that of the step.
            torch.accelerator.synchronize(self._accelerator)
        self._ended = self.clock()

    def end_step(self, once: float = 0.0) -> None:
        """A context has been left.

        It has spent ``once`` seconds on what most steps needn't do: that is paid for, but is no
        cost of the next ones.
        """
        self._left, self._once = self.clock(), once

    def _account(self, inside: float, outside: float) -> bool:
        """Enter a step's seconds inside its context, and until the next one."""
        own = self._began - self._entered + self._left - self._ended
        if self._bill is None and not self._is_look:
            self._plain.append(inside + outside - own)
            self._outside.append(outside)
            self._context = own if math.isnan(self._context) else min(self._context, own)
            self._earn(inside + outside, own)
            return False
        plain = self._plain_time
        between = outside if outside <= AT_MOST * plain else median(self._outside)
        excess = inside + between - plain
        self._earn(inside + outside, 0.0)
        if self._bill is None:
            self._bill = _Bill(excess, self._once)
        else:  # one of the steps after a look
            self._bill.excess += excess
            self._bill.settled += 1
        if self._bill.settled == SETTLING:
            self._pay(self._bill)
            self._bill = None
        return self._bill is None

    def _earn(self, seconds: float, paid: float) -> None:
        self._passed += seconds
        self._spent += paid
        most = math.inf if self._cost is None else max(SAVINGS * self._cost, self._means)
        self._means = min(self._means + self.share * seconds - paid, most)

    def _pay(self, bill: _Bill) -> None:
        cost = bill.excess - bill.once
        known = cost if self._cost is None else self._cost
        self._spent += bill.excess
        # What a run does once isn't saved up for.
        self._means -= cost if self._cost is None else bill.excess
        self._cost = max(known + LEARNING_RATE * (cost - known), 0.0)

    # What is said.

    @property
    def pays_for_none(self) -> str:
        """Why the share pays for no look, after enough steps to know; empty at all other steps."""
        plain, context, cost = self._plain_time, self._context, self._cost
        if self._steps != SAID_AFTER or not cost:
            return ""
        if (self.share * plain - context) * TOO_RARE >= cost:
            return ""
        needed = (context + cost / TOO_RARE) / plain
        return PAYS_FOR_NONE.format(
            share=self.share,
            steps=TOO_RARE,
            context=percent(round(context / plain, 4)),
            look=plain_steps(cost / plain),
            needed=math.ceil(1000 * needed) / 1000,
        )

    @property
    def without_turns(self) -> str:
        """Which quantities had no turn, and why; empty if all had one, or there were no steps."""
        names = [name for name in self._names if not self._turns[name]]
        if not names or not self._steps:
            return ""
        first = WARM_UP + PLAIN
        why = SHORT.format(first=first) if self._steps <= first + 1 else RARE
        return NO_TURN.format(share=self.share, names=few(names), steps=self._steps, why=why)

    def state_dict(self) -> State:
        """What was earned and paid, and what is known of the times of steps.

        The latest step is left out, since its end is that of the program.
        """
        return {
            "names": sorted(self._names),
            "means": self._means,
            "cost": self._cost,
            "plain": list(self._plain),
            "outside": list(self._outside),
            "bill": None if self._bill is None else asdict(self._bill),
            "context": self._context,
            "spent": self._spent,
            "passed": self._passed,
            "turns": dict(self._turns),
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, if it is of the same quantities; the first steps are a warm-up.

        With other quantities, the budget begins anew.
        """
        if state["names"] != sorted(self._names):
            return
        self._means, self._cost = state["means"], state["cost"]
        self._plain = deque(state["plain"], maxlen=RECENT)
        self._outside = deque(state["outside"], maxlen=RECENT)
        self._bill = None if state["bill"] is None else _Bill(**state["bill"])
        self._context, self._spent, self._passed = (
            state[name] for name in ("context", "spent", "passed")
        )
        self._turns = Counter(state["turns"])
        self._steps, self._measured, self._latest = state["steps"], 0, None
        self._decided, self._is_look = {}, False


def _accelerator(device: torch.device | None) -> torch.device | None:
    """A device that runs beside the processor; ``None`` for the processor itself."""
    found = torch.accelerator.current_accelerator()
    is_one = device is not None and found is not None and device.type == found.type
    return device if is_one else None


PAYS_FOR_NONE = (
    "budget={share} doesn't pay for one tracked step in {steps}: a context alone takes {context} "
    "of a step, and tracking once takes {look}: use budget={needed} or more, or fewer quantities"
)
NO_TURN = "with budget={share}, {names} had no turn in {steps} steps: {why}"
SHORT = (
    "the first {first} steps are measured before anything is tracked. Don't use a budget for short "
    "runs"
)
RARE = (
    "none of the few steps that it has paid for was one of their schedules: use a larger budget, "
    "or schedules with more steps"
)
