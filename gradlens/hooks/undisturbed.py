"""Passes through a user's graph of which the model keeps no trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gradlens.hooks.layer_calls import taps_of
from gradlens.hooks.pausable import ListeningHook, Pausable


@contextmanager
def undisturbed(model: nn.Module | None) -> Iterator[None]:
    """Who listens to the model's layers hears nothing of passes inside the context.

    And buffers are as before it afterwards. Hooks of the user's own on activations and modules
    can't be switched off, and do run.
    """
    listeners = [] if model is None else [each for each in _listeners(model) if not each.paused]
    for listener in listeners:
        listener.paused = True
    try:
        with buffers_kept(model):
            yield
    finally:
        for listener in listeners:
            listener.paused = False


def _listeners(model: nn.Module) -> Iterator[Pausable]:
    for tap in taps_of(model):
        yield from tap.listeners
    for module in model.modules():
        hooks: list[Any] = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        for hook in hooks:
            if isinstance(hook, ListeningHook) and hook.listener is not None:
                yield hook.listener


@contextmanager
def hooks_muted(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Without the tensors' own hooks: a user's may count calls, or clip what passes."""
    hooks = [t._backward_hooks for t in tensors if t._backward_hooks]
    kept = [dict(registered) for registered in hooks]
    for registered in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, entries in zip(hooks, kept, strict=True):
            registered.update(entries)


@contextmanager
def buffers_kept(model: nn.Module | None) -> Iterator[None]:
    """Buffers are the same objects, and hold the same, after the context as before.

    Activation checkpointing runs layers again in each backward pass, and normalisation would
    count every run.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in ([] if model is None else model.modules())
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in buffers:
            module._buffers[name] = buffer
            # The graph may have saved it, and would miss the version.
            buffer.data.copy_(values)
