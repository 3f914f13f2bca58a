"""Tracked steps that wait for the optimizer, or for the step after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.per_sample.operators.operator import GradientOperator
from gradlens.quantities.quantity import Quantity, TwoPointQuantity
from gradlens.quantities.step import NothingCoveredError, Step
from gradlens.quantities.update import Update
from gradlens.reductions import DirectionDots


class PendingUpdate:
    """A tracked step whose parameter update is still to come.

    ``on_update`` is called once: by the optimizer's step, or else by ``resolve``. ``retained`` are
    the operators whose projections onto the update are wanted; they are freed then.
    """

    def __init__(
        self,
        step: Step,
        quantities: Sequence[Quantity],
        retained: Mapping[str, GradientOperator],
        on_update: Callable[[PendingUpdate, Update], None],
    ) -> None:
        self.step = step.without_gradients()
        self.quantities = quantities
        self._retained = dict(retained)
        self._on_update: Callable[[PendingUpdate, Update], None] | None = on_update
        self._before = {name: p.detach().clone() for name, p in step.parameters.items()}
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
        """The parameters are what the update has made of them."""
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
        """Take the hook off the optimizer."""
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


class OpenInterval:
    """An update whose end point is the next tracked step; its start point is a step behind."""

    def __init__(self, pending: PendingUpdate, update: Update) -> None:
        self.start = pending.step
        self.quantities = [q for q in pending.quantities if isinstance(q, TwoPointQuantity)]
        self.reduction = DirectionDots(update.direction)
        self._update = update
        self._pending = pending

    def values(self, end: Step) -> dict[str, Any]:
        """The quantities' values, all of them at the start point."""
        if self._pending.overtaken:
            reason = (
                "the optimizer stepped more than once before the next tracked step: enter the "
                "context at every step"
            )
            return {quantity.name: Undefined(reason) for quantity in self.quantities}
        try:
            update = replace(self._update, end_projections=end.total(self.reduction))
        except NothingCoveredError as error:
            if not error.refusal:
                raise
            return {quantity.name: Undefined(error.refusal) for quantity in self.quantities}
        return {q.name: q.compute(self.start, update, end) for q in self.quantities}
