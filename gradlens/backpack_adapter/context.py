"""BackPACK's context: the only place where it is entered.

BackPACK keeps the active extensions in one global place. Entering its context replaces them, also
those of another cockpit, and an empty one keeps what extensions have stored only if it retains
the graph. Contexts that overlap in two threads would restore each other's state, so gradlens's own
passes run one after the other, and extensions are neither activated nor deactivated meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from backpack import backpack, hook_run_extensions
from backpack.context import CTX
from backpack.extensions.backprop_extension import BackpropExtension
from torch import nn

from gradlens.graph.undisturbed import CONTEXT_LOCK
from gradlens.torch_private import backward_hooks


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
    with CONTEXT_LOCK:
        outer, outer_hook = CTX.get_active_exts(), CTX.get_extension_hook()
        context = backpack(*outer, *extensions, extension_hook=run_hooks, debug=debug)
        context.__enter__()
    try:
        yield
    finally:
        with CONTEXT_LOCK:
            context.__exit__(None, None, None)


def extended_by_backpack(model: nn.Module) -> bool:
    """Whether BackPACK's own hooks are on every layer."""
    return all(
        hook_run_extensions in backward_hooks(module).values()
        for module in model.modules()
        if not any(True for _ in module.children())
    )
