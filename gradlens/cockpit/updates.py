"""Quantities that wait for the optimizer's step, or for the next tracked step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.values import WaitingQuantity, recordable
from gradlens.gradients.collect import OVERWRITTEN
from gradlens.gradients.gradients import Setting
from gradlens.graph.hooks import OptimizerFollower
from gradlens.history.coverage import few
from gradlens.history.undefined import Undefined
from gradlens.numerics.checksums import are_different, differing, sums_of_bits
from gradlens.numerics.host import on_host, together
from gradlens.numerics.norms import norms
from gradlens.numerics.shards import any_distributed, whole
from gradlens.numerics.unavailable import UnavailableError
from gradlens.operators.operator import GradientOperator
from gradlens.parts.assembly import Whole
from gradlens.quantities.quantity import Phase
from gradlens.quantities.step import Measure, Step
from gradlens.quantities.update import Update, not_held
from gradlens.reductions import DirectionDots

Record = Callable[[int, Mapping[str, Any]], None]
"""Records values by name at a global step."""


class Updates:
    """The parameter update that follows the latest tracked step, and what waits for it.

    ``interval`` is the update before, if a quantity's value needs the step that ends it.
    """

    def __init__(self, setting: Setting, record: Record, boundary: Boundary) -> None:
        self._setting = setting
        self._record = record
        self._boundary = boundary
        self._pending: PendingUpdate | None = None
        self._end_step = 0
        self._starts_at_once = False
        self.interval: Interval | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a quantity waits for an update, or for the step behind one."""
        return self._pending is not None or self.interval is not None

    @property
    def unfinished(self) -> Mapping[str, int]:
        """The names of quantities that wait, and the steps at which their values are recorded."""
        if self.interval is not None:
            step, waiting = self.interval.start, self.interval.waiting
        elif self._pending is not None and not self._pending.is_over:
            step, waiting = self._pending.step, self._pending.waiting
        else:
            return {}
        return {each.quantity.name: step.global_step for each in waiting}

    @property
    def needs_next_step(self) -> bool:
        """Whether a quantity needs the next step."""
        waiting = () if self._pending is None else self._pending.waiting
        return any(Phase.AT_NEXT_STEP in each.quantity.phases for each in waiting)

    def start_point(self, optimizer: Optimizer | None) -> StartPoint:
        """The parameters as they are, from which an update is measured."""
        return StartPoint(self._setting.parameters, optimizer, self._starts_at_once)

    def wait(
        self,
        step: Step,
        waiting: Sequence[WaitingQuantity],
        batch: Whole,
        start: StartPoint,
    ) -> None:
        """Let quantities wait for the update from ``start``, on which gradients are projected.

        That is when the context was entered, so that an optimizer may also step inside it.
        """
        if self._pending is not None:  # of a context inside this one
            self._pending.close()
        retains = any(each.quantity.retains_gradients for each in waiting)
        kept, why_not = (batch.kept, batch.not_kept) if retains else ({}, "")
        find = partial(_update, dict(step.parameters), start, kept, why_not)
        self._pending = PendingUpdate(step, waiting, find, self._after_update, self._boundary)
        self._pending.start()

    def finish_start(self, start: StartPoint) -> None:
        """Copy the parameters: the context is left, and what the update before took is freed.

        Where something else than the optimizer has changed them, later ones are copied at once.
        """
        start.finish()
        self._starts_at_once |= bool(start.changed)

    def resolve(self) -> None:
        """Take the parameters as they are for those after the update, if it is still awaited."""
        if self._pending is not None:
            self._pending.resolve()

    def begin_step(self, global_step: int) -> None:
        """A context is entered: the update is over.

        An interval ends with all contexts of one step: if one of these was left by an exception, or
        the last one is missing, they may be repeated, but no other step takes their place.
        """
        if self._pending is not None:
            self.resolve_and_close()
        elif self.interval is not None and global_step != self._end_step:
            self.refuse_interval(NEVER_ENDED.format(step=self._end_step))
        self._end_step = global_step

    def resolve_and_close(self) -> None:
        """Nothing waits for the update any more."""
        if self._pending is not None:
            self._pending.resolve()
            self._pending.close()
        self._pending = None

    @property
    def measures(self) -> Sequence[Measure]:
        """What is measured of the step that ends an interval."""
        return () if self.interval is None else (self.interval.pending.changed,)

    def end_interval(self, end: Step, projections: Tensor | None) -> None:
        """Compute what needed this step, and record it at the step before.

        ``projections`` are those of the interval, of all processes.
        """
        interval, self.interval = self.interval, None
        if interval is not None:
            values = interval.values(end, projections, self._boundary)
            self._record(interval.start.global_step, values)

    def refuse_interval(self, reason: str) -> None:
        """Record that what needed this step has no value, and why."""
        if self.interval is not None:
            values = {each.quantity.name: Undefined(reason) for each in self.interval.waiting}
            self._record(self.interval.start.global_step, values)
        self.interval = None

    def close_interval(self) -> None:
        """Nothing needs the latest step any more."""
        self.interval = None

    def _after_update(self, pending: PendingUpdate, update: Update | Undefined) -> None:
        step, values, open_ = pending.step, dict[str, Any](), []
        for each in pending.waiting:
            quantity, value = each.quantity, each.earlier
            if isinstance(update, Undefined):
                value = update
            elif Phase.AFTER_UPDATE in quantity.phases:
                value = self._boundary.value(
                    quantity.name, quantity.after_update, step, update, each.earlier
                )
            if quantity.phases[-1] is Phase.AT_NEXT_STEP and not isinstance(value, Undefined):
                open_.append(WaitingQuantity(quantity, value))
            else:
                values[quantity.name] = self._boundary.value(
                    quantity.name, recordable, quantity, step.global_step, value
                )
        with self._boundary.contain("recording an update"):
            self._record(step.global_step, values)
        if open_ and isinstance(update, Update):
            self.interval = Interval(pending, update, open_)

    def drop(self) -> None:
        """Nothing waits any more."""
        if self._pending is not None:
            self._pending.close()
        self._pending = self.interval = None


class PendingUpdate:
    """A tracked step whose parameter update is still to come.

    ``on_update`` is called once, by the optimizer's step or by ``resolve``, with the update that
    ``find`` returns. ``overtaken`` is the reason why the next step doesn't begin where the update
    ended, if so.
    """

    def __init__(
        self,
        step: Step,
        waiting: Sequence[WaitingQuantity],
        find: Callable[[], Update],
        on_update: Callable[[PendingUpdate, Update | Undefined], None],
        boundary: Boundary,
    ) -> None:
        self.step = step.without_gradients()
        self.waiting = waiting
        self._find: Callable[[], Update] | None = find
        self._on_update = on_update
        self._boundary = boundary
        self.overtaken = ""
        self._end: Mapping[str, Tensor] = {}
        self._changed: tuple[tuple[str, ...], Tensor] = (), torch.zeros(0, device="cpu")
        # It stays until the context after: torch's hooks must not change while they run.
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Set a hook on the optimizer, if it is known and updates all parameters.

        Where several optimizers share the parameters, the update is over at the next step.
        """
        optimizer = self.step.optimizer
        if optimizer is not None and not not_held(optimizer, self.step.parameters):
            hook = optimizer.register_step_post_hook
            self._handles.append(hook(lambda *_: self._stepped()))

    def _stepped(self) -> None:
        if torch.compiler.is_compiling():
            return  # a compiled step, which contains this hook: the update is over at the next step
        if self._find is None:
            self.overtaken = SEVERAL_STEPS
        self.resolve()

    @property
    def is_over(self) -> bool:
        """Whether the update is known."""
        return self._find is None

    def resolve(self) -> None:
        """Compute the update from the parameters as they are now, if that isn't done yet."""
        if self._find is None:
            return
        find = self._find
        # Frees what the update was found from, such as per-sample gradients.
        self._find = None
        with self._boundary.contain("the quantities of an update"), torch.no_grad():
            update = self._boundary.value("the update of the parameters", find)
            del find
            lasts = any(Phase.AT_NEXT_STEP in each.quantity.phases for each in self.waiting)
            # Processes must agree on what they compute, and have only parts of the parameters.
            if lasts and not any_distributed(self.step.parameters.values()):
                self._end = sums_of_bits(self.step.parameters)
            self._on_update(self, update)

    @torch.no_grad()
    def close(self) -> None:
        """Remove the hook from the optimizer: the next step begins."""
        if self._end and not self.overtaken:
            changed = are_different(self._end, sums_of_bits(self.step.parameters))
            self._changed = (*self._end,), changed
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def changed(self, _: Step) -> tuple[tuple[str, ...], Tensor]:
        """Parameters, and whether they have changed since the update, as a measure."""
        return self._changed


def _update(
    after: Mapping[str, nn.Parameter],
    start: StartPoint,
    retained: Mapping[str, GradientOperator],
    without: str,
) -> Update:
    """The update from ``start``, in the memory of its copies, and retained gradients along it."""
    direction = {n: torch.sub(after[n], copy, out=copy) for n, copy in start.copies.items()}
    unchanged = all(each.is_unchanged for each in retained.values())
    operators = retained if unchanged else {}
    # All processes take part in gathering a difference, whatever they have retained.
    gathered = ((name, whole(difference)) for name, difference in direction.items())
    dots = [operators[name].dot(each) for name, each in gathered if name in operators]
    (names, sizes), dots = on_host(
        (together(dict(zip(direction, norms([*direction.values()]), strict=True))), dots)
    )
    return Update(
        direction,
        dict(zip(names, sizes.tolist(), strict=True)),
        torch.stack([each.double() for each in dots]).sum(0) if dots else None,
        without_projections=without if unchanged else OVERWRITTEN,
    )


class Interval:
    """From a tracked step, its ``start``, over its update to the next tracked step."""

    def __init__(
        self, pending: PendingUpdate, update: Update, waiting: Sequence[WaitingQuantity]
    ) -> None:
        self.start = pending.step
        self.reduction = DirectionDots(update.direction)
        self.waiting = waiting
        self.update = update
        self.pending = pending

    @property
    def needs_losses(self) -> bool:
        """Whether per-sample losses of the next step are needed."""
        return any("individual_losses" in each.quantity.needs for each in self.waiting)

    def values(self, end: Step, start: Tensor | None, boundary: Boundary) -> dict[str, Any]:
        """The quantities' values, from the projections at the ``start`` in all processes."""
        names, flags = end.measured(self.pending.changed)
        changed = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
        reason = self.pending.overtaken
        if changed and not reason:
            reason = CHANGED.format(names=few(changed))
        if reason:
            return {each.quantity.name: Undefined(reason) for each in self.waiting}
        found = boundary.value("the interval between two steps", end.total, self.reduction)
        projections = None if start is None else start.cpu()
        update = replace(self.update, projections=projections, end_projections=found)
        return {
            each.quantity.name: found
            if isinstance(found, Undefined)
            else boundary.value(each.quantity.name, self._value, each, update, end)
            for each in self.waiting
        }

    def _value(self, each: WaitingQuantity, update: Update, end: Step) -> Any:
        value = each.quantity.at_next_step(self.start, update, end, each.earlier)
        return recordable(each.quantity, self.start.global_step, value)


NEVER_ENDED = (
    "the next step, {step}, was never completed: an exception has left it, or none of its "
    "micro-batches was the last (accumulating=False)"
)
SEVERAL_STEPS = (
    "the optimizer stepped more than once before the next tracked step: enter the context at every "
    "step"
)
CHANGED = (
    "{names} have changed between the optimizer's step and the next context, so that this doesn't "
    "begin where the update ended. Without optimizer=..., the update is measured when the next "
    "context is entered"
)


LARGE = 64 * 2**20
"""Bytes of parameters above which comparing them twice costs less than memory for one more copy."""


class StartPoint(OptimizerFollower):
    """Copies of the parameters as they are when a step's context is entered.

    Large ones are copied when the context is left, since the update before is freed by then, or
    when the optimizer is about to step inside the context. Meanwhile only the optimizer may change
    them: if something else has, ``copies`` raise ``UnavailableError``.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None, at_once: bool
    ) -> None:
        self._parameters = parameters
        self._copies: dict[str, Tensor] | None = None
        self._sums: Mapping[str, Tensor] = {}
        self.changed: tuple[str, ...] = ()
        if at_once or optimizer is None or not _can_wait(parameters, optimizer):
            self._copy()
            return
        self._sums = sums_of_bits(parameters)
        self.follow(optimizer)

    def finish(self) -> None:
        """Copy the parameters if that isn't done yet: the context is left."""
        self._copy()
        self.close()

    @property
    def copies(self) -> dict[str, Tensor]:
        """The copies by name."""
        if self._copies is None or self.changed:
            raise UnavailableError(CHANGED_INSIDE.format(names=few(self.changed)))
        return self._copies

    def before_step(self) -> None:
        """The optimizer is about to change the parameters: copy them."""
        self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        if self._copies is None:
            if self._sums:
                self.changed = tuple(differing(self._sums, sums_of_bits(self._parameters)))
            self._copies = {name: p.clone() for name, p in self._parameters.items()}


def _can_wait(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> bool:
    size = sum(p.numel() * p.dtype.itemsize for p in parameters.values())
    apart = any_distributed(parameters.values())
    return size > LARGE and not apart and not not_held(optimizer, parameters)


CHANGED_INSIDE = (
    "{names} were changed inside the context, and not by the optimizer that was passed, so that "
    "the start of the update isn't known; it is from the next step on"
)
