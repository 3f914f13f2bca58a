"""Losses for text, with the reductions of PyTorch's."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

SCALE = 8.0
"""Similarities are multiplied by it."""


def retrieved(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of which answer is the right one, by similarities ``[N, ANSWERS]``."""
    return F.cross_entropy(SCALE * outputs, targets, reduction=reduction)


def span(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of the first place of an answer plus that of its last place."""
    return reduced(F.cross_entropy(outputs, targets, reduction="none").sum(1), reduction)


def liked(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """The squared distance of shares from what was liked (Brier, 1950)."""
    return reduced((outputs.sigmoid() - targets).square().mean(1), reduction)
