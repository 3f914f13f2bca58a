"""A hook that is called before each step of an optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from gradlens.hooks.module_hooks import HookOwner, OwnedHook, removal


class OptimizerFollower(HookOwner):
    """Base class of objects that are called before each step of one optimizer."""

    _optimizer: Optimizer | None = None
    _remove_hook: Callable[[], object] | None = None

    def follow(self, optimizer: Optimizer) -> None:
        """Be called before the steps of this optimizer from now on, and of no other."""
        if optimizer is not self._optimizer:
            self.close()
            self._optimizer = optimizer
            hook = OwnedHook(self, OptimizerFollower._call)
            self._remove_hook = removal(self, [optimizer.register_step_pre_hook(hook)])

    def _call(self, *arguments: Any) -> None:
        self.before_step()

    @abstractmethod
    def before_step(self) -> None:
        """The optimizer's step begins."""

    @property
    def is_following(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    def failed(self, error: Exception) -> None:
        """The user's step goes on."""

    def close(self) -> None:
        """Remove the hook."""
        if self._remove_hook is not None:
            self._remove_hook()
        self._remove_hook = self._optimizer = None
