"""Quantities that wait for the optimizer's step, or for the next tracked step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.cockpit.plain import recordable
from gradlens.history.undefined import Undefined
from gradlens.per_sample.operators.operator import GradientOperator
from gradlens.quantities.quantity import Phase, Quantity
from gradlens.quantities.step import NothingCoveredError, Step
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

    def __init__(self, record: Record) -> None:
        self._record = record
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
        retained: Mapping[str, GradientOperator],
        before: Mapping[str, Tensor],
    ) -> None:
        """Let quantities wait for the update from ``before``, on which ``retained`` are projected.

        ``before`` are copies of the parameters when the context was entered, so that an optimizer
        may also step inside it.
        """
        self._pending = PendingUpdate(step, waiting, retained, before, self._after_update)

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

    def end_interval(self, end: Step) -> None:
        """Compute what needed this step, and record it at the step before."""
        if self.interval is not None:
            self._record(self.interval.start.global_step, self.interval.values(end))

    def close_interval(self) -> None:
        """Nothing needs the latest step any more."""
        self.interval = None

    def _after_update(self, pending: PendingUpdate, update: Update) -> None:
        step, values, open_ = pending.step, {}, []
        for each in pending.waiting:
            quantity, earlier = each.quantity, each.earlier
            if Phase.AFTER_UPDATE in quantity.phases:
                earlier = quantity.after_update(step, update, earlier)
            if quantity.phases[-1] is Phase.AT_NEXT_STEP:
                open_.append(WaitingQuantity(quantity, earlier))
            else:
                values[quantity.name] = recordable(quantity, step.global_step, earlier)
        self._record(step.global_step, values)
        if open_:
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
        retained: Mapping[str, GradientOperator],
        before: Mapping[str, Tensor],
        on_update: Callable[[PendingUpdate, Update], None],
    ) -> None:
        self.step = step.without_gradients()
        self.waiting = waiting
        self._retained = dict(retained)
        self._on_update: Callable[[PendingUpdate, Update], None] | None = on_update
        self._before = dict(before)
        self.overtaken = False
        # It stays until the context after: torch's hooks must not change while they run.
        self._handle = (
            None
            if step.optimizer is None
            else step.optimizer.register_step_post_hook(lambda *_: self._stepped())
        )

    def _stepped(self) -> None:
        self.overtaken = self._on_update is None
        self.resolve()

    @torch.no_grad()
    def resolve(self) -> None:
        """Compute the update from the parameters as they are now, if that isn't done yet."""
        on_update = self._on_update
        if on_update is None:
            return
        direction = _difference(self.step.parameters, self._before)
        projections = _projections(self._retained, direction)
        self._on_update = None
        self._retained.clear()
        self._before.clear()
        on_update(self, Update(direction, projections))

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None


def _difference(
    after: Mapping[str, nn.Parameter], before: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    return {name: after[name].detach() - value for name, value in before.items()}


def _projections(
    retained: Mapping[str, GradientOperator], direction: Mapping[str, Tensor]
) -> Tensor | None:
    dots = [operator.dot(direction[name]).cpu().double() for name, operator in retained.items()]
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
    def needs_losses(self) -> bool:
        """Whether per-sample losses of the next step are needed."""
        return any("individual_losses" in each.quantity.needs for each in self.waiting)

    def values(self, end: Step) -> dict[str, Any]:
        """The quantities' values, of which ``start`` is the step."""
        return {
            each.quantity.name: recordable(
                each.quantity, self.start.global_step, self._value(each, end)
            )
            for each in self.waiting
        }

    def _value(self, each: WaitingQuantity, end: Step) -> Any:
        if self._pending.overtaken:
            return Undefined(OVERTAKEN)
        try:
            update = replace(self._update, end_projections=end.total(self.reduction))
        except NothingCoveredError as error:
            if not error.refusal:
                raise
            return Undefined(error.refusal)
        return each.quantity.at_next_step(self.start, update, end, each.earlier)


OVERTAKEN = (
    "the optimizer stepped more than once before the next tracked step: enter the context at every "
    "step"
)
