"""Hooks on modules, tensors and optimizers, which belong to an object of gradlens's own."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.torch_private import (
    ScriptedModule,
    UnscriptedHook,
    forward_hooks,
    forward_pre_hooks,
    in_transform,
    remove_hook,
    set_compiled_call,
    set_part,
    unseen,
)


def takes_hooks(module: nn.Module) -> bool:
    """Whether a module can have forward hooks: all but those that ``torch.jit.script`` compiled."""
    return not isinstance(module, ScriptedModule)


def is_traced() -> bool:
    """Whether the present call only tells torch what to compute, or to differentiate.

    Hooks do nothing then: what they compute would be a part of the code that a compiler or
    ``torch.jit.trace`` makes. In transforms of ``torch.func``, tensors stand for others, which may
    have another axis, and are gone afterwards.
    """
    # The compiler first: what else is read in compiled code, it compiles anew for.
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or in_transform()
    )


class HookOwner:
    """Base class of objects that have hooks, which do nothing while the owner is ``paused``.

    gradlens pauses them in backward passes of its own, which are no part of the user's training.
    """

    _paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the owner's hooks do nothing."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def failed(self, error: Exception) -> None:
        """Called with an exception of a hook, which is raised in the user's pass by default."""
        raise error


Owner = TypeVar("Owner", bound=HookOwner)


class OwnedHook(UnscriptedHook, Generic[Owner]):
    """A hook on a module or a tensor, which calls ``function(owner, *arguments of the hook)``.

    The owner is referenced weakly, so that a model or a graph doesn't keep it alive. Copies and
    pickles of a module contain its hooks; there, the hooks have no owner and do nothing.
    """

    def __init__(
        self, owner: Owner | None = None, function: Callable[..., None] | None = None
    ) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._function = function

    @property
    def owner(self) -> Owner | None:
        """The object that the hook belongs to; ``None`` in copies, and once it was deleted."""
        return None if self._owner is None else self._owner()

    def __call__(self, *arguments: Any) -> None:
        if is_traced():
            return
        owner = self.owner
        if owner is None or self._function is None or owner._paused:
            return
        try:
            with unseen():
                self._function(owner, *arguments)
        except Exception as error:
            owner.failed(error)

    def __reduce__(self) -> tuple[type[OwnedHook[Owner]], tuple[()]]:
        return type(self), ()


def removal(owner: HookOwner, handles: Iterable[RemovableHandle]) -> Callable[[], object]:
    """A function that removes an owner's hooks, which is also called when the owner is deleted."""
    found = weakref.finalize(owner, _remove, tuple(handles))
    found.atexit = False
    return found


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        remove_hook(handle)


def hook_owners(modules: Iterable[nn.Module]) -> set[HookOwner]:
    """The owners of all hooks on modules; a hook may be its own."""
    hooks: list[Any] = []
    for module in modules:
        hooks += [*forward_pre_hooks(module), *forward_hooks(module)]
    owners = [hook.owner if isinstance(hook, OwnedHook) else hook for hook in hooks]
    return {owner for owner in owners if isinstance(owner, HookOwner)}


def on_gradient(tensor: Tensor, function: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a function with the gradient at a tensor, in each backward pass that computes one."""
    # Without this, register_hook crashes the process (torch 2.13) where the tensor was changed in
    # place and then through a view of it: its node is renewed when it is read.
    _ = tensor.grad_fn
    return tensor.register_hook(function)


NO_MODULE = "a {kind} is not a model: pass the nn.Module itself"


def without_hooks(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters, runs no hooks, and doesn't change the module's state.

    ``ValueError`` if its output might be another one than the module's own.
    """
    if "forward" in vars(module):
        raise ValueError("its forward was replaced on the instance")
    if not all(isinstance(hook, (OwnedHook, HookOwner)) for hook in forward_pre_hooks(module)):
        raise ValueError("it has forward pre-hooks, which may set what it computes with")
    # Not by copy.copy, which parametrised modules forbid.
    clone = object.__new__(type(module))
    vars(clone).update(vars(module))
    state = vars(clone)
    for name, value in list(state.items()):
        if isinstance(value, (dict, list, set)):
            state[name] = copy.copy(value)
    for name, child in module.named_children():
        set_part(clone, name, without_hooks(child))
    # In place of what runs hooks, also those of all modules; a copy mustn't wait for a collector.
    forward: Any = weakref.WeakMethod(clone.forward)
    set_compiled_call(clone, lambda *args, **keywords: forward()(*args, **keywords))
    return clone
