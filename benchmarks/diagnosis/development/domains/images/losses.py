"""Losses for images, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

TEMPERATURE = 0.2
"""Similarities are divided by it; Chen et al., 2020, compare values from 0.05 to 1."""


def entropy_and_overlap(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Binary cross-entropy plus Dice loss (Milletari et al., 2016) of each image."""
    entropy = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    shares = outputs.sigmoid()
    overlap = 2 * (shares * targets).flatten(1).sum(1) + 1
    dice = 1 - overlap / ((shares + targets).flatten(1).sum(1) + 1)
    return reduced(entropy.flatten(1).mean(1) + dice, reduction)


def contrasted(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Each of two views ``[N, 2, D]`` is to be found among the others of the batch.

    This is the loss of Radford et al., 2021, which has no use for targets.
    """
    first, second = F.normalize(outputs, dim=2).unbind(1)
    similar = first @ second.T / TEMPERATURE
    own = torch.arange(len(outputs))
    losses = [F.cross_entropy(s, own, reduction=reduction) for s in (similar, similar.T)]
    return (losses[0] + losses[1]) / 2
