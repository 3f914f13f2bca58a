"""Losses for robots, with the reductions of PyTorch's."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced


def chords(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Distances between directions on the circle, and how far outputs are from its length."""
    length = outputs.norm(dim=1)
    away = (F.normalize(outputs, dim=1) - targets).norm(dim=1)
    return reduced(away + 0.1 * (length - 1).square(), reduction)
