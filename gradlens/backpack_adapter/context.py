"""BackPACK's context: the only place where it is entered.

BackPACK keeps the active extensions in one global place. Entering its context replaces them, also
those of another cockpit. Contexts that overlap in two threads would run each other's extensions, so
that none is entered while extensions are active in another thread.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from backpack import backpack, hook_run_extensions
from backpack.context import CTX
from backpack.extensions.backprop_extension import BackpropExtension
from torch import nn

from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import backward_hooks

_LOCK = threading.RLock()
"""Held while the context is changed."""


class _Hooks:
    """The extension hooks of a context, which belongs to the thread that it is entered in."""

    def __init__(self, hooks: Sequence[Callable[[nn.Module], None]]) -> None:
        self.thread = threading.get_ident()
        self._hooks = hooks

    def __call__(self, module: nn.Module) -> None:
        for hook in self._hooks:
            hook(module)


@contextmanager
def with_extensions(
    extensions: Sequence[BackpropExtension],
    hooks: Sequence[Callable[[nn.Module], None]],
    debug: bool = False,
) -> Iterator[None]:
    """A context in which extensions and extension hooks are active, besides the active ones.

    ``UnavailableError`` if some are active in another thread.
    """
    # The lock isn't held inside, where the user's backward pass may wait for other threads.
    with _LOCK:
        hook = CTX.get_extension_hook()
        if isinstance(hook, _Hooks) and hook.thread != threading.get_ident():
            raise UnavailableError(OTHER_THREAD)
        found = _Hooks([hook, *hooks])
        outer = CTX.get_active_exts()
        context = backpack(*outer, *extensions, extension_hook=found, debug=debug)
        context.__enter__()
    try:
        yield
    finally:
        with _LOCK:
            context.__exit__(None, None, None)


def contained(
    extension: BackpropExtension, context: Callable[[], AbstractContextManager[None]]
) -> BackpropExtension:
    """The same extension, whose exceptions end in a context instead of in the backward pass."""
    found = copy.copy(extension)
    kind: Any = type(extension)

    class Contained(kind):  # type: ignore[misc]
        def __call__(self, module: nn.Module, g_inp: Any, g_out: Any) -> None:
            with context():
                super().__call__(module, g_inp, g_out)

    found.__class__ = Contained
    return found


def extended_by_backpack(model: nn.Module) -> bool:
    """Whether BackPACK's own hooks are on a layer; it runs on the layers that have them."""
    return any(hook_run_extensions in backward_hooks(module).values() for module in model.modules())


OTHER_THREAD = (
    "extensions of BackPACK are active in another thread, and BackPACK has one context for all "
    "threads: run trainings with extensions in processes of their own, or one after the other"
)
