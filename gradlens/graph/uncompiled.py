"""Runs what ``torch.compile`` has compiled uncompiled, where the operations themselves are needed.

A compiled function has one node in the loss's graph, without the operations that it consists of,
and hooks on the layers inside it don't run. ``torch.compiler.set_stance`` switches compilation off,
and compiled code is kept for later calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradlens.graph.graph import Graph
from gradlens.graph.kinds import COMPILED
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import (
    compiled_call,
    compiled_modules,
    compiler_is_imported,
    hooked_forward,
    set_compiled_call,
)

RAN_COMPILED = (
    "its gradient is computed inside what torch.compile has made, which can't be looked into: pass "
    "the compiled model to the cockpit, and a compiled loss module as loss_function=..., or run "
    "the forward pass, with the loss, inside `with cockpit.forward(step):`. Without a cockpit, run "
    'it inside `with torch.compiler.set_stance("force_eager"):`'
)
INSIDE = (
    "a context of the cockpit was entered inside a function that torch.compile has compiled: enter "
    "it around the call of this function"
)


class uncompiled_calls:  # noqa: N801
    """A context in which nothing runs compiled; see ``torch.compiler.set_stance``.

    That holds in all threads, since the stance is the process's. Contexts of several threads may
    overlap: the user's own stance is restored when the last of them is left. ``UnavailableError``
    inside compiled code, whose stance can't be changed.
    """

    _lock = threading.RLock()
    _entered: ClassVar[weakref.WeakSet[uncompiled_calls]] = weakref.WeakSet()
    _stance: ClassVar[Any] = None

    def __enter__(self) -> None:
        if not compiler_is_imported():
            return
        with self._lock:
            self._entered.add(self)
            if uncompiled_calls._stance is None:
                try:
                    uncompiled_calls._stance = torch.compiler.set_stance("force_eager")
                except RuntimeError as error:
                    raise UnavailableError(INSIDE) from error

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered.discard(self)
            if uncompiled_calls._stance is not None and not self._entered:
                uncompiled_calls._stance.__exit__(None, None, None)
                uncompiled_calls._stance = None


class EagerCall:
    """Runs what it has ``replaced`` in a compiled module, uncompiled if a user needs that.

    It changes nothing inside other compiled code, and in forward passes without gradients.
    """

    def __init__(self, module: nn.Module) -> None:
        self.replaced = compiled_call(module)
        self.users: weakref.WeakSet[EagerCalls] = weakref.WeakSet()
        self._call = self.replaced or hooked_forward(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._call(*args, **kwargs)
        if any(user.needed for user in self.users):
            with uncompiled_calls():
                return self._call(*args, **kwargs)
        return self._call(*args, **kwargs)


class EagerCalls:
    """Runs the compiled modules among some models and their parts uncompiled while ``needed``."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self.needed = False

    def run_if(self, needed: bool) -> None:
        """Run later calls uncompiled if needed, also of modules that were compiled lately."""
        self.needed = needed
        if needed:
            for module in self._compiled_modules():
                if not isinstance(compiled_call(module), EagerCall):
                    set_compiled_call(module, EagerCall(module))
                compiled_call(module).users.add(self)

    def close(self) -> None:
        """Run nothing uncompiled any more, and undo what modules have got for it."""
        self.needed = False
        for module in self._compiled_modules():
            call = compiled_call(module)
            if isinstance(call, EagerCall):
                call.users.discard(self)
                if not call.users:
                    set_compiled_call(module, call.replaced)
        self._models = []

    def _compiled_modules(self) -> list[nn.Module]:
        return [module for model in self._models for module in compiled_modules(model)]


def ran_compiled(tensor: Tensor) -> bool:
    """Whether compiled code computed a part of the graph of a tensor, such as a loss."""
    is_made = compiler_is_imported() and tensor.grad_fn is not None
    return is_made and COMPILED in Graph(tensor).kinds
