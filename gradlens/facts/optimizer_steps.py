"""What happens to gradients between a backward pass and the next one: the optimizer's steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.facts.parameters import gradients_of, unscaled_norm
from gradlens.graph.hooks import OptimizerFollower
from gradlens.graph.scaler import GradientScale
from gradlens.torch_private import version


@dataclass(frozen=True)
class _Left:
    """A parameter and its gradient when a context was left, or when the optimizer used it."""

    parameter: nn.Parameter
    updates: int
    gradient: weakref.ref[Tensor]
    changes: int
    is_used: bool = False

    def now(self) -> Tensor | None:
        """The gradient, if it is the parameter's still."""
        gradient = self.gradient()
        return gradient if self.parameter.grad is gradient else None

    def is_stale(self) -> bool:
        """Whether the optimizer has used the gradient, and it is still what it was then."""
        gradient = self.now()
        return (
            gradient is not None
            and version(gradient) == self.changes
            and (self.is_used or version(self.parameter) > self.updates)
            # Zeros that were written by gradient.data.zero_() don't count as a change.
            and bool(gradient.any())
        )


class OptimizerSteps(OptimizerFollower):
    """Counts an optimizer's steps after a backward pass, and finds what they begin with.

    The ``norm`` of the gradients is computed only if they have changed since the backward pass, as
    by clipping. ``is_stale`` says that the latest backward pass has added to the gradients of a
    past step, judged by one parameter: to one that the optimizer has used, and that was changed
    nowhere since. What isn't certain doesn't count: where the optimizer isn't known, a loop that
    clips gradients in place isn't found, nor is one with a fused optimizer, whose updates autograd
    doesn't count.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int] = []
        self._scale: GradientScale | None = None
        self._left: _Left | None = None
        self._was_stale = self._goes_on = False
        self.count = 0
        self.norm: Tensor | None = None
        self.is_stale = False

    def enter(self, optimizer: Optimizer | None) -> None:
        """The next backward pass comes: see whether the gradient of the last one is still there."""
        self._was_stale = self._left is not None and self._left.is_stale()
        if optimizer is not None:
            self.follow(optimizer)

    def leave(self, goes_on: bool) -> None:
        """The backward pass is over; the step may go on with another one, before an update."""
        self._goes_on = goes_on
        left, self._left = self._left, self._now()
        self.is_stale = False
        if self._was_stale and left is not None and self._left is not None:
            added = self._left.changes == left.changes + 1
            self.is_stale = added and self._left.gradient() is left.gradient()

    def begin(self, scale: GradientScale | None) -> None:
        """The optimizer's steps come next; with the gradients' ``scale``, their norm is found."""
        self.count, self.norm, self._scale = 0, None, scale
        self._versions = [] if scale is None else self._present_versions()

    def before_step(self) -> None:
        """Count it; whatever has changed the gradient until now hasn't set it to zero."""
        self.count += 1
        scale = self._scale if self.count == 1 else None
        if scale is not None and self._versions != self._present_versions():
            gradients = gradients_of(self._parameters)
            self.norm = unscaled_norm(gradients, scale.of(self._parameters))
        left = None if self._left is None else self._left.now()
        if left is None or self._left is None or self._goes_on:
            return  # one that goes on runs in a closure, within the optimizer's step
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        if any(each is self._left.parameter for group in groups for each in group["params"]):
            self._left = replace(self._left, changes=version(left), is_used=True)

    def _present_versions(self) -> list[int]:
        return [version(gradient) for gradient in gradients_of(self._parameters).values()]

    def _now(self) -> _Left | None:
        for parameter in self._parameters.values():
            gradient = parameter.grad
            if type(gradient) is Tensor and gradient.layout is torch.strided:
                changes = version(gradient)
                return _Left(parameter, version(parameter), weakref.ref(gradient), changes)
        return None


NOT_ZEROED = (
    "the backward pass has added to gradients that the optimizer had used already, so that p.grad "
    "is a sum over steps: call optimizer.zero_grad() before it"
)
