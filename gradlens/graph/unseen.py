"""The context of gradlens's own work in the user's loop, which the user's tools don't see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from gradlens.torch_private import tools_off

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices whose autocast gradlens switches off."""


def unseen() -> AbstractContextManager[Any]:
    """A context for gradlens's own work, as if it were done outside of all contexts of the user's.

    Modes, classes of tensors and hooks for saved tensors see none of its operations, and nothing
    is computed under autocast or in anomaly mode.
    """
    contexts = tools_off()
    for device in DEVICES:
        if torch.is_autocast_enabled(device):
            contexts.append(torch.autocast(device, enabled=False))
    if torch.is_anomaly_enabled():
        contexts.append(_anomalies_undetected())
    # Entered dozens of times a step, almost always where there is nothing else to switch off.
    return contexts[0] if len(contexts) == 1 else _together(contexts)


@contextmanager
def _together(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


@contextmanager
def _anomalies_undetected() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(False):
        yield
