"""Losses for logistics, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.diagnosis.development.reduction import reduced


def late_costs_more(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Exponential where it gets later than said, linear where it doesn't (Varian, 1975)."""
    errors = targets - outputs
    return reduced((errors.clamp(max=5).exp() - errors - 1).sum(1), reduction)


def exponential_pairs(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Of each pair that is in the wrong order (Freund et al., 2003)."""
    is_better = (targets[:, :, None] > targets[:, None]).to(outputs.dtype)
    pairs = torch.exp((outputs[:, None] - outputs[:, :, None]).clamp(max=5))
    return reduced((is_better * pairs).sum((1, 2)) / is_better.sum((1, 2)), reduction)
