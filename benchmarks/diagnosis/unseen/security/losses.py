"""Losses for security, with the reductions of PyTorch's."""

from __future__ import annotations

from torch import Tensor

from benchmarks.diagnosis.development.reduction import reduced

POWER = 0.5
"""Between cross entropy, 0, and the mean absolute error, 1."""


def generalised_cross_entropy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """It withstands wrong labels (Zhang and Sabuncu, 2018)."""
    shares = outputs.softmax(1).gather(1, targets[:, None])[:, 0]
    return reduced((1 - (shares + 1e-8) ** POWER) / POWER, reduction)
