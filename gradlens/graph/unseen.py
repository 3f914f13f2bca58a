"""The context of gradlens's own work in the user's loop, which the user's tools don't see."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from gradlens.torch_private import dispatch_modes_off, packing_off, torch_functions_off

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices whose autocast gradlens switches off."""


def unseen() -> AbstractContextManager[Any]:
    """A context for gradlens's own work, as if it were done outside of all contexts of the user's.

    Modes, classes of tensors and hooks for saved tensors see none of its operations, and nothing
    is computed under autocast or in anomaly mode.
    """
    functions, modes, packing = torch_functions_off(), dispatch_modes_off(), packing_off()
    enabled = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    anomalies = torch.is_anomaly_enabled()
    # Entered dozens of times a step, almost always where there is nothing else to switch off.
    if modes is None and packing is None and not enabled and not anomalies:
        return functions
    stack = ExitStack()
    for each in (functions, modes, packing):
        if each is not None:
            stack.enter_context(each)
    for device in enabled:
        stack.enter_context(torch.autocast(device, enabled=False))
    if anomalies:
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
    return stack
