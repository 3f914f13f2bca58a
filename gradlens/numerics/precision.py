"""Precisions that sums can be computed in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def double(tensor: Tensor) -> Tensor:
    """In float64 where the device has it, in float32 elsewhere."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def accumulable(tensor: Tensor) -> Tensor:
    """Detached, and in float32 where sums in the tensor's own precision would lose digits."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def autocast_off(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on the tensor's device."""
    device = tensor.device.type
    # Switching autocast off takes longer than this check.
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
