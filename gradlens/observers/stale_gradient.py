"""Finds gradients of the step before that the next backward pass adds to."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gradlens.graph.hooks import OptimizerFollower
from gradlens.observers.observer import Observer, Outcome, Records, StepContext
from gradlens.torch_private import version


@dataclass(frozen=True)
class _Left:
    """A parameter and its gradient when a context was left, or when the optimizer used it."""

    parameter: nn.Parameter
    updates: int
    gradient: weakref.ref[Tensor]
    changes: int
    is_used: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the parameter's gradient is the same tensor still."""
        gradient = self.gradient()
        return gradient is not None and self.parameter.grad is gradient

    @property
    def is_stale(self) -> bool:
        """Whether the optimizer has used the gradient, and it is still what it was then."""
        gradient = self.gradient()
        return (
            gradient is not None
            and self.is_there
            and version(gradient) == self.changes
            and (self.is_used or version(self.parameter) > self.updates)
            # Zeros that were written by gradient.data.zero_() don't count as a change.
            and bool(gradient.any())
        )


class StaleGradient(OptimizerFollower, Observer):
    """Whether the training loop lacks ``zero_grad``, judged by one parameter.

    It lacks one if a gradient that the optimizer has used is changed nowhere until the next
    backward pass adds to it. What isn't certain doesn't count: where the optimizer isn't passed to
    the context, a loop that clips gradients in place isn't found, nor is one with a fused
    optimizer, whose updates autograd doesn't count.
    """

    work = "looking for gradients that were not set to zero"

    def __init__(self, parameters: Iterable[nn.Parameter], records: Records) -> None:
        self._parameters = tuple(parameters)
        self._records = records
        self._left: _Left | None = None
        self._was_stale = self._goes_on = False
        self.is_stale = False
        """Whether the latest backward pass has added to the gradient of a past step."""

    def enter(self, context: StepContext) -> None:
        """See whether the gradient of the step before is still there."""
        optimizer = context.info.get("optimizer")
        self._was_stale = self._left is not None and self._left.is_stale
        if optimizer is not None:
            self.follow(optimizer)

    def before_step(self) -> None:
        """Whatever has changed the gradient until now, such as clipping, hasn't set it to zero."""
        left = self._left
        if self._goes_on:  # the last backward pass runs in a closure, within the optimizer's step
            return
        if left is not None and left.is_there and self._holds(left.parameter):
            gradient = left.gradient()
            assert gradient is not None
            self._left = replace(left, changes=version(gradient), is_used=True)

    def _holds(self, parameter: nn.Parameter) -> bool:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return any(each is parameter for group in groups for each in group["params"])

    def leave(self, context: StepContext, outcome: Outcome) -> None:
        """See whether the backward pass has added to it.

        The step may go on with another micro-batch, whose gradient the optimizer waits for.
        """
        self._goes_on = context.accumulating and outcome.error is None
        left, self._left = self._left, self._now()
        self.is_stale = False
        if self._was_stale and left is not None and self._left is not None:
            added = self._left.changes == left.changes + 1
            self.is_stale = added and self._left.gradient() is left.gradient()
        if self.is_stale:
            self._records.note(context.global_step, NOT_ZEROED)

    def _now(self) -> _Left | None:
        for parameter in self._parameters:
            gradient = parameter.grad
            if type(gradient) is Tensor and gradient.layout is torch.strided:
                changes = version(gradient)
                return _Left(parameter, version(parameter), weakref.ref(gradient), changes)
        return None


NOT_ZEROED = (
    "the backward pass has added to gradients that the optimizer had used already, so that p.grad "
    "is a sum over steps: call optimizer.zero_grad() before it"
)
