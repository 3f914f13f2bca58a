"""Backward passes of gradlens's own through a user's graph, after which the model is as before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from gradlens.hooks.module_hooks import hook_owners
from gradlens.hooks.torch_private import gradient_hooks


@contextmanager
def undisturbed(model: nn.Module | None) -> Iterator[None]:
    """Pause gradlens's hooks on the model, and restore its buffers afterwards.

    The user's own hooks on activations and modules can't be switched off: they do run.
    """
    with ExitStack() as stack:
        for owner in set() if model is None else hook_owners(model):
            stack.enter_context(owner.paused())
        stack.enter_context(buffers_kept(model))
        yield


@contextmanager
def hooks_muted(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Without the tensors' own hooks, which may count calls or clip gradients."""
    hooks = [registered for tensor in tensors if (registered := gradient_hooks(tensor))]
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
    """Restore a model's buffers: the same tensors, with the same values as before the context.

    Activation checkpointing runs layers again in each backward pass, and each run of a
    normalisation would change its running statistics.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in ([] if model is None else model.modules())
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in buffers:
            setattr(module, name, buffer)
            # Through .data, since the graph may have saved the buffer and checks its version.
            buffer.data.copy_(values)
