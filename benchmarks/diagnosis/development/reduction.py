"""The reductions of PyTorch's losses, for losses that are known by sample."""

from __future__ import annotations

from torch import Tensor


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """The mean or the sum of the samples' losses."""
    return losses.mean() if reduction == "mean" else losses.sum()
