"""Follows the steps of the optimizer that contexts are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from torch.optim import Optimizer

from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.budget import Budget
from gradlens.graph.hooks import HookOwner, OwnedHook, removal
from gradlens.observers.observer import Observer
from gradlens.torch_private import runs_step_hooks


class OptimizerSteps(HookOwner):
    """Tells observers when the optimizer of the latest context begins its step, and ends it.

    A step inside of another one's, such as that of a base optimizer, is a part of it. Compiled
    steps aren't seen. Hooks stay from step to step, since a compiled step would be compiled anew
    for others.
    """

    def __init__(
        self, observers: Sequence[Observer], boundary: Boundary, budget: Budget | None
    ) -> None:
        self._observers = observers
        self._boundary = boundary
        self._budget = budget
        self._optimizer: Optimizer | None = None
        self._remove_hooks: Callable[[], object] = lambda: None
        self._depth = 0
        self._is_told = False

    def follow(self, optimizer: Optimizer | None) -> None:
        """A context is entered with this optimizer; without one, it is the last one still."""
        self._is_told = True
        if optimizer is None or optimizer is self._optimizer or not self._observers:
            return
        self.close()
        if runs_step_hooks(optimizer):
            before = optimizer.register_step_pre_hook(OwnedHook(self, OptimizerSteps._begin))
            after = optimizer.register_step_post_hook(OwnedHook(self, OptimizerSteps._end))
            self._remove_hooks = removal(self, [before, after])
            self._optimizer = optimizer

    def rest(self) -> None:
        """A context is entered in which nothing is tracked: nobody is told until the next one."""
        self._is_told = False

    def forget(self) -> None:
        """A context is left: a step that has begun before, and hasn't ended, has raised.

        Or the context is in its closure; its end is that of a step, too.
        """
        self._depth = 0

    def _begin(self, optimizer: Optimizer, *_: object) -> None:
        self._depth += 1
        if self._depth == 1 and self._is_told:
            self._tell(lambda each: each.before_optimizer(optimizer))

    def _end(self, optimizer: Optimizer, *_: object) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._is_told:
            self._tell(lambda each: each.after_optimizer(optimizer))

    def _tell(self, what: Callable[[Observer], None]) -> None:
        with nullcontext() if self._budget is None else self._budget.optimizer_step():
            self._boundary.tell(self._observers, what)

    def close(self) -> None:
        """Remove the hooks."""
        self._remove_hooks()
        self._optimizer = None
