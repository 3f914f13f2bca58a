"""The global state of torch and BackPACK that gradlens changes while it works.

An interrupt (Ctrl-C) may come between any two instructions, also in front of the one that would
restore a mode. The context of a step therefore restores everything once more if it is left by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from backpack.context import CTX
from torch import Tensor

from gradlens.hooks.torch_private import function_mode_depth, pop_function_mode

DEVICES = ("cpu", "cuda")
"""Kinds of devices whose autocast gradlens switches off."""


def without_autocast() -> AbstractContextManager[None]:
    """A context in which autocast is off on all of these devices."""
    enabled = list(filter(torch.is_autocast_enabled, DEVICES))
    # Entered more than a hundred times a step, almost always where there is nothing to switch off.
    return _without_autocast(enabled) if enabled else nullcontext()


@contextmanager
def _without_autocast(devices: Iterable[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


class GlobalState:
    """The modes as they are now, and the gradients of the parameters that are to be kept."""

    def __init__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        self._autocast = [(device, torch.is_autocast_enabled(device)) for device in DEVICES]
        self._extensions, self._hook = CTX.get_active_exts(), CTX.get_extension_hook()
        self._debug, self._retain_graph = CTX.get_debug(), CTX.get_retain_graph()
        self._depth = function_mode_depth()
        self._gradients: list[tuple[Tensor, Tensor | None]] = []

    def keep_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Restore these gradients, too, if they are taken away from their parameters."""
        self._gradients = [(each, each.grad) for each in parameters if each.is_leaf]

    def restore(self) -> None:
        """Restore all of it."""
        torch.set_grad_enabled(self._grad_enabled)
        for device, enabled in self._autocast:
            torch.set_autocast_enabled(device, enabled)
        CTX.set_active_exts(self._extensions)
        CTX.set_extension_hook(self._hook)
        CTX.set_debug(self._debug)
        CTX.set_retain_graph(self._retain_graph)
        while function_mode_depth() > self._depth:
            pop_function_mode()
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
