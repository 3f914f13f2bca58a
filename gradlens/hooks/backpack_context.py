"""BackPACK's context: the only place where it is entered.

BackPACK keeps the active extensions in one global place. Entering its context replaces them, also
those of another cockpit, and an empty one keeps what extensions have stored only if it retains
the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from backpack import backpack
from backpack.context import CTX
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn

from gradlens.hooks.undisturbed import attributes_kept, training_kept, undisturbed


def with_extensions(
    extensions: Sequence[BackpropExtension],
    hooks: Sequence[Callable[[nn.Module], None]],
    debug: bool = False,
) -> backpack:
    """A context in which extensions and extension hooks are active, besides the active ones."""
    outer, outer_hook = CTX.get_active_exts(), CTX.get_extension_hook()

    def run_hooks(module: nn.Module) -> None:
        for hook in (outer_hook, *hooks):
            hook(module)

    return backpack(*outer, *extensions, extension_hook=run_hooks, debug=debug)


def with_extension_alone(extension: BackpropExtension) -> backpack:
    """A context in which one extension is active, and the graph stays."""
    return backpack(extension, retain_graph=True)


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
        backpack(retain_graph=True),
        undisturbed(model),
        training_kept(parameters),
        attributes_kept(functions),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),
    ):
        yield
