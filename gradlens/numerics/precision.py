"""Precisions that sums can be computed in."""

from __future__ import annotations

import torch
from torch import Tensor


def double(tensor: Tensor) -> Tensor:
    """In float64 where the device has it, in float32 elsewhere."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def accumulable(tensor: Tensor) -> Tensor:
    """Detached, and in float32 where sums in the tensor's own precision would lose digits."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
