"""Losses for energy, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.diagnosis.development.reduction import reduced

LEVELS = (0.2, 0.5, 0.8)
"""Weights of errors of one sign, for each output."""


def expectiles(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared errors with a weight for each sign (Newey and Powell, 1987)."""
    errors = targets - outputs
    levels = torch.tensor(LEVELS, dtype=outputs.dtype, device=outputs.device)
    weights = torch.where(errors > 0, levels, 1 - levels)
    return reduced((weights * errors.square()).sum(1), reduction)
