"""Losses for graphs and clouds of points, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.diagnosis.development.reduction import reduced


def chamfer(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Mean distance of points from the nearest one of the others, both ways (Fan et al., 2017)."""
    distances = torch.cdist(outputs, targets)
    return reduced(distances.amin(2).mean(1) + distances.amin(1).mean(1), reduction)


def welsch(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared errors that count less the larger they are (Dennis and Welsch, 1978)."""
    squared = (outputs - targets).square()
    return reduced((1 - (-squared / 2).exp()).flatten(1).mean(1), reduction)


def relative_squares(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared lengths of the errors of vectors, relative to one more than those of the vectors."""
    errors = (outputs - targets).square().sum(2)
    return reduced((errors / (1 + targets.square().sum(2))).mean(1), reduction)
