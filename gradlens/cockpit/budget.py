"""Tracking within a share of the training time: a token bucket."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from gradlens.history.coverage import few, percent
from gradlens.history.records import Spending, plain_steps
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
class _Account:
    """What was earned and paid, and what is known of the times of steps: all that a state has.

    ``means`` can be spent, and ``cost`` is the mean cost of a look, once it is known. ``plain`` are
    the latest times of steps without tracking, ``outside`` the parts of these between contexts, and
    ``context`` the least time of a context. Of a look that isn't paid yet, ``excess`` are the
    seconds that it, and ``settled`` steps after it, took above plain steps; ``once`` is the part of
    it that later looks don't cost.
    """

    means: float = 0.0
    cost: float | None = None
    plain: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    context: float = math.nan
    excess: float | None = None
    once: float = 0.0
    settled: int = 0
    spent: float = 0.0
    passed: float = 0.0
    steps: int = 0
    turns: dict[str, int] = field(default_factory=dict)

    @property
    def plain_time(self) -> float:
        """The time of a plain step; NaN before one was measured."""
        return median(self.plain) if self.plain else math.nan


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
        self._account = _Account()
        self._decided: dict[int, bool] = {}
        self._is_look = False
        self._measured = 0
        self._latest: int | None = None
        self._entered = self._own = self._ended = self._left = self._once = self._in_step = 0.0

    @property
    def latest_step(self) -> int:
        """The step whose context was entered last; 0 before there was one."""
        return self._latest or 0

    @property
    def spending(self) -> Spending:
        """The share of the time that tracking has taken, and the turns of the quantities."""
        account = self._account
        taken = account.spent / account.passed if account.passed else math.nan
        cost = math.nan if account.cost is None else account.cost
        turns = {name: account.turns.get(name, 0) for name in self._names}
        return Spending(self.share, taken, account.plain_time, cost, turns)

    def has_means(self, global_step: int) -> bool:
        """Whether a step may be a look; decided once for each step that may come next."""
        if global_step not in self._decided:
            account = self._account
            is_ready = account.excess is None and self._measured >= WARM_UP + PLAIN
            has_means = account.cost is None or account.means >= account.cost
            self._decided[global_step] = is_ready and not self._is_look and has_means
        return self._decided[global_step]

    # The times of a step, in their order.

    def begin_step(self, global_step: int) -> bool:
        """A context is entered; whether what was tracked has been paid for by the step before."""
        now, before = self.clock(), self._latest
        has_paid = False
        if self._measured >= WARM_UP:
            has_paid = self._enter(self._left - self._entered, now - self._left)
        if global_step != before:
            self._decided = {n: d for n, d in self._decided.items() if n == global_step}
            self._is_look = False
        self._entered = self._ended = self._left = now
        self._own, self._in_step, self._latest = 0.0, 0.0, global_step
        self._account.steps += 1
        self._measured += 1
        return has_paid

    def begin_backward(self) -> None:
        """A context has been entered: the backward pass is about to run."""
        self._own = self.clock() - self._entered

    def end_backward(self, names: Collection[str]) -> None:
        """A context is about to be left, in which quantities of these names are computed."""
        for name in names:
            self._account.turns[name] = self._account.turns.get(name, 0) + 1
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
        self._own += self._left - self._ended

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """A context for what is computed in the optimizer's step, between two contexts."""
        began = self.clock()
        try:
            yield
        finally:
            self._in_step += self.clock() - began

    def _enter(self, inside: float, outside: float) -> bool:
        """Enter a step's seconds inside its context, and after it; whether a look was paid."""
        account, own = self._account, self._own
        is_plain = account.excess is None and not self._is_look
        if is_plain:
            account.plain = [*account.plain, inside + outside - own][-RECENT:]
            account.outside = [*account.outside, outside][-RECENT:]
            account.context = own if math.isnan(account.context) else min(account.context, own)
        paid = own if is_plain else 0.0
        account.passed += inside + outside
        account.spent += paid
        most = math.inf if account.cost is None else max(SAVINGS * account.cost, account.means)
        account.means = min(account.means + self.share * (inside + outside) - paid, most)
        if is_plain:
            return False
        plain = account.plain_time
        # What the optimizer's hook has computed is no validation, however long it takes.
        rest = outside - self._in_step
        between = self._in_step + (rest if rest <= AT_MOST * plain else median(account.outside))
        if account.excess is None:
            account.excess, account.once, account.settled = 0.0, self._once, -1
        account.excess += inside + between - plain
        account.settled += 1
        if account.settled < SETTLING:
            return False
        cost = account.excess - account.once
        known = cost if account.cost is None else account.cost
        account.spent += account.excess
        # What a run does once isn't saved up for.
        account.means -= cost if account.cost is None else account.excess
        account.cost = max(known + LEARNING_RATE * (cost - known), 0.0)
        account.excess = None
        return True

    # What is said.

    @property
    def pays_for_none(self) -> str:
        """Why the share pays for no look, after enough steps to know; empty at all other steps."""
        account = self._account
        plain, context, cost = account.plain_time, account.context, account.cost
        if account.steps != SAID_AFTER or not cost:
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
        steps, turns = self._account.steps, self._account.turns
        names = [name for name in self._names if name not in turns]
        if not names or not steps:
            return ""
        first = WARM_UP + PLAIN
        why = SHORT.format(first=first) if steps <= first + 1 else RARE
        return NO_TURN.format(share=self.share, names=few(names), steps=steps, why=why)

    def state_dict(self) -> State:
        """The account; the latest step is left out, since its end is that of the program."""
        return {"names": sorted(self._names), "account": asdict(self._account)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, if it is of the same quantities; the first steps are a warm-up.

        With other quantities, the budget begins anew.
        """
        if state["names"] == sorted(self._names):
            self._account = _Account(**state["account"])
            self._measured, self._latest = 0, None
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
