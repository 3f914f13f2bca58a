"""Quantities that wait for the optimizer's step, or for the next tracked step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.values import OF_OPTIMIZERS, recordable
from gradlens.gradients.collect import OVERWRITTEN
from gradlens.graph.scaler import GradientScale
from gradlens.history.coverage import few
from gradlens.history.undefined import Undefined
from gradlens.numerics.checksums import are_different, sums_of_bits
from gradlens.numerics.norms import norms
from gradlens.numerics.shards import any_distributed, whole
from gradlens.numerics.tensors import on_host, together
from gradlens.observers.observer import Observer
from gradlens.operators.operator import GradientOperator
from gradlens.parts.assembly import Whole
from gradlens.quantities.quantity import Phase, Quantity
from gradlens.quantities.step import Step
from gradlens.quantities.update import Update, not_held
from gradlens.reductions import DirectionDots
from gradlens.torch_private import version

Record = Callable[[int, Mapping[str, Any]], None]
"""Records values by name at a global step."""
OfAll = Callable[[Any], list[Any]]
"""Makes a list of all processes' values of this one's."""


class Updates(Observer):
    """The parameter update that follows the latest tracked step, and what waits for it.

    ``pending`` is the update that is still awaited, and ``interval`` the one before the present
    step, if a quantity's value needs that step.
    """

    work = "the quantities of an optimizer"

    def __init__(self, record: Record, boundary: Boundary, of_all: OfAll) -> None:
        self._record = record
        self._boundary = boundary
        self._of_all = of_all
        self.pending: PendingUpdate | None = None
        self._end_step = 0
        self.interval: PendingUpdate | None = None

    @property
    def unfinished(self) -> Mapping[str, int]:
        """The names of quantities that wait, and the steps at which their values are recorded."""
        found = self.interval or self.pending
        if found is None:
            return {}
        return {each.name: found.step.global_step for each in found.waiting}

    def wait(
        self,
        step: Step,
        waiting: Mapping[Quantity, Any],
        batch: Whole,
        start: Mapping[str, Tensor],
    ) -> None:
        """Let quantities wait for the update from ``start``, on which gradients are projected.

        ``start`` are copies of the parameters from when the context was entered, so that an
        optimizer may also step inside it. An update of a context inside this one is over.
        """
        shared = self._record, self._boundary, self._of_all
        self.pending = PendingUpdate(step, waiting, batch, start, *shared)

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Call the quantities of its gradients."""
        if self.pending is not None and self.pending.step.optimizer is optimizer:
            self.pending.before_optimizer()

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Call the quantities of its state, and those of the update, which is over."""
        if self.pending is not None and self.pending.step.optimizer is optimizer:
            self.pending.after_optimizer()

    def resolve(self) -> None:
        """Take the parameters as they are for those after the update, if it is still awaited."""
        if self.pending is not None:
            self.pending.resolve()

    def begin_step(self, global_step: int) -> None:
        """A context is entered: the update is over.

        An interval ends with all contexts of one step: if one of these was left by an exception, or
        the last one is missing, they may be repeated, but no other step takes their place.
        """
        if self.pending is not None:
            self.pending.resolve()
            self.pending.end()
            self.interval = None if self.pending.update is None else self.pending
            self.pending = None
        elif self.interval is not None and global_step != self._end_step:
            self.refuse_interval(NEVER_ENDED.format(step=self._end_step))
        self._end_step = global_step

    def end_interval(self, end: Step, projections: Tensor | None) -> None:
        """Compute what needed this step, and record it at the step before.

        ``projections`` are those of the interval, of all processes.
        """
        interval, self.interval = self.interval, None
        if interval is not None:
            self._record(interval.step.global_step, interval.values(end, projections))

    def refuse_interval(self, reason: str) -> None:
        """Record that what needed this step has no value, and why."""
        if self.interval is not None:
            values = {each.name: Undefined(reason) for each in self.interval.waiting}
            self._record(self.interval.step.global_step, values)
        self.interval = None

    def drop(self) -> None:
        """Nothing waits any more."""
        self.pending = self.interval = None


class PendingUpdate:
    """A tracked step, and the quantities ``waiting`` for the parameter update after it.

    The update is over when the optimizer steps, or is told to be by ``resolve``. Those that need
    the next step, too, wait for that from then on. ``overtaken`` is the reason why the next step
    doesn't begin where the update ended, if so. Where a quantity needs the next step, ``update`` is
    what is known by then, and ``reduction`` projects the next step's gradients on it.
    """

    def __init__(
        self,
        step: Step,
        waiting: Mapping[Quantity, Any],
        batch: Whole,
        start: Mapping[str, Tensor],
        record: Record,
        boundary: Boundary,
        of_all: OfAll,
    ) -> None:
        self.step = step.without_gradients()
        self.waiting = {**waiting}
        self._record = record
        self._boundary = boundary
        self._of_all = of_all
        self._start: Mapping[str, Tensor] | None = start
        self._scale = step.gradient_scale
        self._called = set[Phase]()
        self._is_seen = False
        self._batch: Whole | None = None
        if any(each.retains_gradients for each in waiting):
            self._batch = batch
        self.update: Update | None = None
        self.overtaken = ""
        self.reduction = DirectionDots({})
        self._end: Mapping[str, Tensor] = {}
        self._changed: tuple[tuple[str, ...], Tensor] = (), torch.zeros(0, device="cpu")
        optimizer = step.optimizer
        # Where several optimizers share the parameters, the update is over at the next step.
        self._is_of_all = optimizer is not None and not not_held(optimizer, step.parameters)
        self._given = self._gradients()

    @property
    def needs_next_step(self) -> bool:
        """Whether a quantity needs the step after the update."""
        return any(Phase.AT_NEXT_STEP in each.phases for each in self.waiting)

    @property
    def needs_losses(self) -> bool:
        """Whether per-sample losses of the next step are needed."""
        return any("individual_losses" in each.needs for each in self.waiting)

    def before_optimizer(self) -> None:
        """The optimizer begins its step."""
        if not self._is_seen:
            self._given = self._gradients()
            self._see([Phase.BEFORE_OPTIMIZER], self._scale)

    def _gradients(self) -> dict[str, tuple[int, int]]:
        """Which tensors the gradients are, and how often each was written to, by name."""
        if not self._of(*OF_OPTIMIZERS):
            return {}
        gradients = ((name, p.grad) for name, p in self.step.parameters.items())
        return {name: (id(g), version(g)) for name, g in gradients if g is not None}

    def after_optimizer(self) -> None:
        """The optimizer has stepped."""
        if not self._is_seen:
            self._is_seen = True
            # What comes before a step hasn't been seen if the context is in its closure.
            are_same = self._gradients().items() <= self._given.items()
            overwritten = "" if are_same else CHANGED_INSIDE
            self._see(OF_OPTIMIZERS, self._scale.after_step()[0], overwritten)
        if self._start is None:
            self.overtaken = SEVERAL_STEPS
        if self._is_of_all:
            self.resolve()

    def _see(self, phases: Sequence[Phase], scale: GradientScale, overwritten: str = "") -> None:
        """Call quantities of the optimizer, while it has its gradients of this ``scale``.

        ``overwritten`` is that of ``Step``.
        """
        with self._boundary.contain("the quantities of an optimizer"), torch.no_grad():
            for phase in phases:
                if phase not in self._called and (called := self._of(phase)):
                    self._called.add(phase)
                    step = replace(self.step, gradient_scale=scale, overwritten=overwritten)
                    self._call(phase, self._with_measures(called, step))

    def _with_measures(self, called: Sequence[Quantity], step: Step) -> Step:
        """The step for these quantities, which are refused if the optimizer leaves it out."""
        _, left_out = self._scale.after_step()

        def is_left_out(_: Step) -> Tensor | None:
            return left_out

        measures = [measure for each in called for measure in each.measures]
        measures += [] if left_out is None else [is_left_out]
        step = replace(step, measures=measures)
        if left_out is not None and bool(step.measured(is_left_out)):
            self._refuse(called, UNSEEN)
        return step

    def resolve(self) -> None:
        """Compute the update from the parameters as they are now, if that isn't done yet."""
        if self._start is None:
            return
        if not self._is_seen:
            with self._boundary.contain("the quantities of an optimizer"):
                self._refuse(self._of(*OF_OPTIMIZERS), UNSEEN)
        if not self.waiting:
            self._start = self._batch = None
            return
        is_relative = any(each.is_relative for each in self.waiting)
        keeps_start = any(each.returns_to_start for each in self.waiting)
        parameters, start, batch = self.step.parameters, self._start, self._batch
        # Frees what the update was found from, such as per-sample gradients.
        self._start = self._batch = None
        with self._boundary.contain("the quantities of an update"), torch.no_grad():
            found = self._boundary.value(
                *("the update of the parameters", _update, parameters, start, batch),
                *(is_relative, keeps_start),
            )
            del start, batch
            # Processes must agree on what they compute, and have only parts of the parameters.
            if self.needs_next_step and not any_distributed(parameters.values()):
                self._end = sums_of_bits(parameters)
            if isinstance(found, Undefined):
                self._refuse(self.waiting, found.reason)
            else:
                found = replace(found, of_all=self._of_all)
                self._call(Phase.AFTER_UPDATE, self.step, found)
                if self.waiting:
                    self.update = replace(found, start={})
                    self.reduction = DirectionDots(found.direction)

    def _of(self, *phases: Phase) -> list[Quantity]:
        return [each for each in self.waiting if {*phases} & {*each.phases}]

    def _call(self, phase: Phase, *known: Any) -> None:
        """Call the quantities of a phase with what is known, and record what is complete."""
        values = dict[str, Any]()
        for quantity, value in [*self.waiting.items()]:
            if phase in quantity.phases:
                method = getattr(quantity, phase.value)
                value = self._boundary.value(quantity.name, method, *known, value)
            if quantity.phases[-1] is phase or isinstance(value, Undefined):
                values[quantity.name] = self._boundary.value(
                    quantity.name, recordable, quantity, self.step.global_step, value
                )
                del self.waiting[quantity]
            else:
                self.waiting[quantity] = value
        self._take(values)

    def _refuse(self, refused: Iterable[Quantity], reason: str) -> None:
        """Record that quantities have no value, and why."""
        values = {each.name: Undefined(reason) for each in refused}
        self.waiting = {q: each for q, each in self.waiting.items() if q.name not in values}
        self._take(values)

    def _take(self, values: Mapping[str, Any]) -> None:
        if values:
            number = self.step.global_step
            self._boundary.attempt("recording an update", None, self._record, number, values)

    @torch.no_grad()
    def end(self) -> None:
        """The next step begins: see what has changed since the update."""
        if self._end and not self.overtaken:
            changed = are_different(self._end, sums_of_bits(self.step.parameters))
            self._changed = (*self._end,), changed

    def changed(self, _: Step) -> tuple[tuple[str, ...], Tensor]:
        """Parameters, and whether they have changed since the update, as a measure."""
        return self._changed

    def values(self, end: Step, start: Tensor | None) -> dict[str, Any]:
        """The quantities' values, from the projections at the ``start`` in all processes."""
        names, flags = end.measured(self.changed)
        changed = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
        reason = self.overtaken
        if changed and not reason:
            reason = CHANGED.format(names=few(changed))
        if reason or self.update is None:
            return {each.name: Undefined(reason) for each in self.waiting}
        found = self._boundary.value("the interval between two steps", end.total, self.reduction)
        projections = None if start is None else start.cpu()
        update = replace(self.update, projections=projections, end_projections=found)
        return {
            quantity.name: found
            if isinstance(found, Undefined)
            else self._boundary.value(quantity.name, self._value, quantity, update, end, earlier)
            for quantity, earlier in self.waiting.items()
        }

    def _value(self, quantity: Quantity, update: Update, end: Step, earlier: Any) -> Any:
        value = quantity.at_next_step(self.step, update, end, earlier)
        return recordable(quantity, self.step.global_step, value)


def _update(
    after: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    batch: Whole | None,
    is_relative: bool,
    keeps_start: bool,
) -> Update:
    """The update from ``start``, and retained gradients along it.

    It is in the memory of the copies, unless these are kept.
    """
    retained: Mapping[str, GradientOperator] = {} if batch is None else batch.kept
    before = _norms(start) if is_relative else ((), None)
    out = {n: torch.empty_like(copy) for n, copy in start.items()} if keeps_start else start
    direction = {n: torch.sub(after[n], copy, out=out[n]) for n, copy in start.items()}
    unchanged = all(each.is_unchanged for each in retained.values())
    operators = retained if unchanged else {}
    # All processes take part in gathering a difference, whatever they have retained.
    gathered = ((name, whole(difference)) for name, difference in direction.items())
    dots = [operators[name].dot(each) for name, each in gathered if name in operators]
    (names, sizes), (_, starts), dots = on_host((_norms(direction), before, dots))
    without = "" if batch is None else batch.not_kept
    return Update(
        direction,
        dict(zip(names, sizes.tolist(), strict=True)),
        torch.stack([each.double() for each in dots]).sum(0) if dots else None,
        without_projections=without if unchanged else OVERWRITTEN,
        start_norms={} if starts is None else dict(zip(names, starts.tolist(), strict=True)),
        start=start if keeps_start else {},
    )


def _norms(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], Tensor]:
    return together(dict(zip(tensors, norms([*tensors.values()]), strict=True)))


NEVER_ENDED = (
    "the next step, {step}, was never completed: an exception has left it, or none of its "
    "micro-batches was the last (accumulating=False)"
)
CHANGED_INSIDE = (
    "p.grad has changed inside of the optimizer's step, which writes into it or calls its closure "
    "again, so that the gradient which it has taken isn't known: with torch's SGD with "
    "nesterov=True, pass foreach=False to it; with others, such as LBFGS, track GradNorm, whose "
    "gradient is that of the backward pass"
)
UNSEEN = (
    "the optimizer's step wasn't seen: a gradient scaler has left it out, or it is a part of "
    "compiled code, ran inside the context, runs no hooks, as that of some wrappers, or wasn't "
    "called"
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
