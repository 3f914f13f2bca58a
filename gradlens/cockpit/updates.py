"""Quantities that wait for the optimizer's step, or for the next tracked step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.plain import recordable
from gradlens.history.undefined import Undefined
from gradlens.numerics.shards import whole
from gradlens.numerics.strata import Drawn, all_drawn
from gradlens.per_sample.kept_samples import KeptGradients
from gradlens.per_sample.operators.operator import GradientOperator
from gradlens.quantities.quantity import Phase, Quantity
from gradlens.quantities.step import Step
from gradlens.quantities.update import Update
from gradlens.reductions import DirectionDots

Record = Callable[[int, Mapping[str, Any]], None]
"""Records values by name at a global step."""


@dataclass(frozen=True)
class WaitingQuantity:
    """A quantity that isn't finished, and what its earlier phases have returned."""

    quantity: Quantity
    earlier: Any = None


class Updates:
    """The parameter update that follows the latest tracked step, and what waits for it.

    ``interval`` is the update before, if a quantity's value needs the step that ends it.
    """

    def __init__(self, record: Record, boundary: Boundary) -> None:
        self._record = record
        self._boundary = boundary
        self._pending: PendingUpdate | None = None
        self.interval: Interval | None = None

    @property
    def needs_next_step(self) -> bool:
        """Whether a quantity needs the next step."""
        waiting = () if self._pending is None else self._pending.waiting
        return any(Phase.AT_NEXT_STEP in each.quantity.phases for each in waiting)

    def wait(
        self,
        step: Step,
        waiting: Sequence[WaitingQuantity],
        retained: KeptGradients,
        before: Mapping[str, Tensor],
    ) -> None:
        """Let quantities wait for the update from ``before``, on which ``retained`` are projected.

        ``before`` are copies of the parameters when the context was entered, so that an optimizer
        may also step inside it.
        """
        self._pending = PendingUpdate(
            step, waiting, retained, before, self._after_update, self._boundary
        )
        self._pending.start()

    def resolve(self) -> None:
        """Take the parameters as they are for those after the update, if it is still awaited."""
        if self._pending is not None:
            self._pending.resolve()

    def begin_step(self) -> None:
        """The next context is entered: the update is over."""
        if self._pending is not None:
            self._pending.resolve()
            self._pending.close()
        self._pending = None

    def end_interval(self, end: Step, projections: Drawn | None) -> None:
        """Compute what needed this step, and record it at the step before.

        ``projections`` are those of the interval, of all processes.
        """
        if self.interval is not None:
            values = self.interval.values(end, projections, self._boundary)
            self._record(self.interval.start.global_step, values)

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


class PendingUpdate:
    """A tracked step whose parameter update is still to come.

    ``on_update`` is called once, by the optimizer's step or by ``resolve``. ``overtaken`` says that
    the optimizer has stepped again since. ``retained`` are operators whose projections on the
    update are computed; they are freed then.
    """

    def __init__(
        self,
        step: Step,
        waiting: Sequence[WaitingQuantity],
        retained: KeptGradients,
        before: Mapping[str, Tensor],
        on_update: Callable[[PendingUpdate, Update | Undefined], None],
        boundary: Boundary,
    ) -> None:
        self.step = step.without_gradients()
        self.waiting = waiting
        self._retained = retained
        self._on_update: Callable[[PendingUpdate, Update | Undefined], None] | None = on_update
        self._boundary = boundary
        self._before = dict(before)
        self.overtaken = False
        # It stays until the context after: torch's hooks must not change while they run.
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Set a hook on the optimizer, if it is known and updates all parameters.

        Where several optimizers share the parameters, the update is over at the next step.
        """
        optimizer = self.step.optimizer
        if optimizer is not None and _holds(optimizer, self.step.parameters.values()):
            hook = optimizer.register_step_post_hook
            self._handles.append(hook(lambda *_: self._stepped()))

    def _stepped(self) -> None:
        self.overtaken = self._on_update is None
        self.resolve()

    @torch.no_grad()
    def resolve(self) -> None:
        """Compute the update from the parameters as they are now, if that isn't done yet."""
        on_update = self._on_update
        if on_update is None:
            return
        update = self._boundary.value("the update of the parameters", self._update)
        self._on_update = None
        self._retained = KeptGradients()
        self._before.clear()
        with self._boundary.contain("the quantities of an update"):
            on_update(self, update)

    def _update(self) -> Update:
        direction = _difference(self.step.parameters, self._before)
        retains = any(each.quantity.retains_gradients for each in self.waiting)
        projections = _projections(self._retained.operators, direction) if retains else None
        return Update(direction, projections, strata=self._retained.strata)

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _holds(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether an optimizer updates all parameters that aren't frozen."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return all(id(p) in held for p in parameters if p.requires_grad)


def _difference(
    after: Mapping[str, nn.Parameter], before: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    return {name: after[name].detach() - value for name, value in before.items()}


def _projections(
    retained: Mapping[str, GradientOperator], direction: Mapping[str, Tensor]
) -> Tensor | None:
    # All processes take part in gathering a difference, whatever they have retained.
    gathered = ((name, whole(difference)) for name, difference in direction.items())
    dots = [retained[n].dot(each).cpu().double() for n, each in gathered if n in retained]
    return torch.stack(dots).sum(0) if dots else None


class Interval:
    """From a tracked step, its ``start``, over its update to the next tracked step."""

    def __init__(
        self, pending: PendingUpdate, update: Update, waiting: Sequence[WaitingQuantity]
    ) -> None:
        self.start = pending.step
        self.reduction = DirectionDots(update.direction)
        self.waiting = waiting
        self._update = update
        self._pending = pending

    @property
    def projections(self) -> Drawn | None:
        """Projections of this process's samples at the start, if there are any."""
        values = self._update.projections
        return None if values is None else Drawn(values, self._update.strata)

    @property
    def needs_losses(self) -> bool:
        """Whether per-sample losses of the next step are needed."""
        return any("individual_losses" in each.quantity.needs for each in self.waiting)

    def values(self, end: Step, start: Drawn | None, boundary: Boundary) -> dict[str, Any]:
        """The quantities' values, from the projections at the ``start`` in all processes."""
        if self._pending.overtaken:
            return {each.quantity.name: Undefined(OVERTAKEN) for each in self.waiting}
        found = boundary.value("the interval between two steps", end.total, self.reduction)
        strata = () if start is None or all_drawn(start.strata) else start.strata
        update = replace(
            self._update,
            projections=None if start is None else start.values.cpu(),
            end_projections=found,
            strata=strata,
        )
        return {
            each.quantity.name: found
            if isinstance(found, Undefined)
            else boundary.value(each.quantity.name, self._value, each, update, end)
            for each in self.waiting
        }

    def _value(self, each: WaitingQuantity, update: Update, end: Step) -> Any:
        value = each.quantity.at_next_step(self.start, update, end, each.earlier)
        return recordable(each.quantity, self.start.global_step, value)


OVERTAKEN = (
    "the optimizer stepped more than once before the next tracked step: enter the context at every "
    "step"
)
