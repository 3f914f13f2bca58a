"""What tracking takes of the training time, and tracking within a share of it: a token bucket."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from gradlens.history.coverage import few, percent
from gradlens.history.records import Spending, plain_steps
from gradlens.stateful import State

WARM_UP = 2
"""First steps that are not measured, since torch sets up kernels and memory in them, and gradlens
finds whose rows are whose."""
SAID_AFTER = 50
"""Steps after which it is said what they have shown: most of what a run says at all can be seen by
then, and a user still watches."""
FEWEST = 5
"""Steps without tracking whose median is taken for the time of a plain step."""
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
TOO_RARE = 1000
"""Steps in which a share must pay for one look at least, or it pays for none."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, and of gradlens's own work and the backward pass in it.

    ``is_look`` says that something was tracked.
    """

    whole: float = 0.0
    own: float = 0.0
    inside: float = 0.0
    is_look: bool = False


def spending(times: Sequence[StepTimes]) -> Spending:
    """What tracking has taken of the time of some steps.

    Where some of them aren't tracked, they tell that, too; where all are, it is between gradlens's
    own time and that with the time of the backward pass.
    """
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


class Costs:
    """Measures what the first ``SAID_AFTER`` steps take, and tracking in them.

    The time of a step is that from its first context to that of the next one.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.steps = 0
        self._latest: int | None = None
        self._entered = self._own = self._ended = self._left = self._in_step = 0.0
        self._is_look = False
        self._of_step = StepTimes()
        self._times: list[StepTimes] = []

    @property
    def latest_step(self) -> int:
        """The step whose context was entered last; 0 before there was one."""
        return self._latest or 0

    @property
    def spending(self) -> Spending:
        """What tracking has taken of the time."""
        return spending(self._times)

    def has_means(self, global_step: int) -> bool:
        """Whether anything may be tracked at a step."""
        return True

    # The times of a step, in their order.

    def begin_step(self, global_step: int) -> bool:
        """A context is entered; whether more is known of what tracking takes."""
        now, is_next = self.clock(), global_step != self._latest
        is_known = self._latest is not None and self._take_in(now, is_next)
        self._entered = self._ended = self._left = now
        self._own, self._in_step, self._latest = 0.0, 0.0, global_step
        self._is_look &= not is_next
        self.steps += is_next
        return is_known

    def _take_in(self, now: float, is_over: bool) -> bool:
        """Take in the times of the last context, with which its step may be over."""
        if self.steps > SAID_AFTER:
            return False
        before, own = self._of_step, self._own
        self._of_step = StepTimes(
            before.whole + now - self._entered,
            before.own + own + self._in_step,
            before.inside + self._left - self._entered - own,
            self._is_look,
        )
        if is_over:
            self._times += [self._of_step] if self.steps > WARM_UP else []
            self._of_step = StepTimes()
        return is_over and self.steps == SAID_AFTER and bool(self._times)

    def begin_backward(self) -> None:
        """A context has been entered: the backward pass is about to run."""
        self._own = self.clock() - self._entered

    def end_backward(self, names: Collection[str]) -> None:
        """A context is about to be left, in which quantities of these names are computed."""
        self._is_look |= bool(names)
        self._ended = self.clock()

    def end_step(self, once: float = 0.0) -> None:
        """A context has been left.

        It has spent ``once`` seconds on what most steps needn't do.
        """
        self._left = self.clock()
        self._own += self._left - self._ended

    def optimizer_step(self, began: float) -> None:
        """What has begun then was computed in the optimizer's step, between two contexts."""
        self._in_step += self.clock() - began

    def state_dict(self) -> State:
        """How many steps there were; a program measures its own times."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.steps = state["steps"]


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
    turns: dict[str, int] = field(default_factory=dict)

    @property
    def plain_time(self) -> float:
        """The time of a plain step; NaN before one was measured."""
        return median(self.plain) if self.plain else math.nan


class Budget(Costs):
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
        super().__init__(clock)
        self.share = share
        self._accelerator = _accelerator(device)
        self._names = tuple(names)
        self._account = _Account()
        self._decided: dict[int, bool] = {}
        self._measured = 0
        self._once = 0.0

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

    def begin_step(self, global_step: int) -> bool:
        """A context is entered; whether what was tracked has been paid for by the step before."""
        is_next = global_step != self._latest
        has_paid = super().begin_step(global_step)
        if is_next:
            self._decided = {n: d for n, d in self._decided.items() if n == global_step}
        self._measured += 1
        return has_paid

    def _take_in(self, now: float, is_over: bool) -> bool:
        is_measured = self._measured >= WARM_UP
        return is_measured and self._enter(self._left - self._entered, now - self._left)

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
        """As before; ``once`` is paid for, but is no cost of the next steps."""
        super().end_step(once)
        self._once = once

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
        if self.steps != SAID_AFTER or not cost:
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
        steps, names = self.steps, [n for n in self._names if n not in self._account.turns]
        if not names or not steps:
            return ""
        first = WARM_UP + PLAIN
        why = SHORT.format(first=first) if steps <= first + 1 else RARE
        return NO_TURN.format(share=self.share, names=few(names), steps=steps, why=why)

    def state_dict(self) -> State:
        """With the account; the latest step is left out, since its end is that of the program."""
        account = {"names": sorted(self._names), "account": asdict(self._account)}
        return {**super().state_dict(), **account}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, if it is of the same quantities; the first steps are a warm-up.

        With other quantities, the budget begins anew.
        """
        super().load_state_dict(state)
        if state.get("names") == sorted(self._names):
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
