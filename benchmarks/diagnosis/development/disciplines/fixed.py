"""Numbers that belong to a task and are the same for each seed of the data."""

from __future__ import annotations

import torch
from torch import Tensor


def fixed(seed: int, *shape: int) -> Tensor:
    """Normal random numbers of their own seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
