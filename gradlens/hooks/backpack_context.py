"""BackPACK's context: the only place where it is entered.

BackPACK keeps the active extensions in one global place. Entering its context replaces them, also
those of another cockpit, and an empty one keeps what extensions have stored only if it retains
the graph. Contexts that overlap in two threads would restore each other's state, so gradlens's own
passes run one after the other, and extensions are neither activated nor deactivated meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from backpack import backpack
from backpack.context import CTX
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn

from gradlens.hooks.undisturbed import attributes_kept, training_kept, undisturbed

_CONTEXT_LOCK = threading.RLock()
"""Held while BackPACK's context is changed, and during gradlens's own passes."""


@contextmanager
def with_extensions(
    extensions: Sequence[BackpropExtension],
    hooks: Sequence[Callable[[nn.Module], None]],
    debug: bool = False,
) -> Iterator[None]:
    """A context in which extensions and extension hooks are active, besides the active ones."""

    def run_hooks(module: nn.Module) -> None:
        for hook in (outer_hook, *hooks):
            hook(module)

    # The lock isn't held inside, where the user's backward pass may wait for other threads.
    with _CONTEXT_LOCK:
        outer, outer_hook = CTX.get_active_exts(), CTX.get_extension_hook()
        context = backpack(*outer, *extensions, extension_hook=run_hooks, debug=debug)
        context.__enter__()
    try:
        yield
    finally:
        with _CONTEXT_LOCK:
            context.__exit__(None, None, None)


@contextmanager
def with_extension_alone(extension: BackpropExtension) -> Iterator[None]:
    """A context in which one extension is active, and the graph stays."""
    with _CONTEXT_LOCK, backpack(extension, retain_graph=True):
        yield


@contextmanager
def own_pass(
    model: nn.Module | None, parameters: Iterable[Tensor] = (), functions: Iterable[Any] = ()
) -> Iterator[None]:
    """A context for gradlens's own backward passes through a user's graph.

    No extension is active, gradlens's hooks on the model are paused, and what BackPACK has stored
    for the user's backward pass stays. Buffers, random numbers, the gradients of ``parameters`` and
    the attributes of ``functions``, nodes of functions in Python, are as before afterwards. Anomaly
    mode is off, which is meant for the user's backward pass.
    """
    with (
        _CONTEXT_LOCK,
        backpack(retain_graph=True),
        undisturbed(model),
        training_kept(parameters),
        attributes_kept(functions),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),
    ):
        yield
