"""Precisions that sums can be computed in."""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = 2**17
"""Elements of a tensor that is converted to float64 for sums of squares and products.

Measured on two cores: with so few, calls take most of the time, and float64 needs fewer of them,
since squares of float32 don't leave its range.
"""


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor is small, and its squares are within the range of float64."""
    narrower = tensor.dtype.itemsize < torch.float64.itemsize
    return narrower and tensor.numel() <= SMALL and tensor.device.type != "mps"


def double(tensor: Tensor) -> Tensor:
    """In float64 where the device has it, in float32 elsewhere."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def widest(device: torch.device) -> torch.dtype:
    """The precision of ``double``."""
    return torch.float32 if device.type == "mps" else torch.float64


def accumulable(tensor: Tensor) -> Tensor:
    """Detached, and in float32 where sums in the tensor's own precision would lose digits."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
