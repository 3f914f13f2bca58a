"""Losses for series, with the reductions of PyTorch's."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

SMALLEST = 0.01
"""What is added to a scale."""
QUARTIC = 0.1
"""Differences below it count as their squares, and larger ones as they are."""
ROUGH = 0.5
"""Weight of differences between neighbours."""


def student(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of Student's t-distribution (Salinas et al., 2020).

    ``outputs`` are place, and scale and degrees of freedom before they are made positive.
    """
    place, scale, freedom = outputs.unbind(1)
    scale, freedom = F.softplus(scale) + SMALLEST, 2 + F.softplus(freedom)
    distance = ((targets[:, 0] - place) / scale).square() / freedom
    normaliser = (freedom / 2).lgamma() - ((freedom + 1) / 2).lgamma()
    likelihood = normaliser + (freedom * math.pi).log() / 2 + scale.log()
    return reduced(likelihood + (freedom + 1) / 2 * distance.log1p(), reduction)


def value_and_slope(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared errors of values, and of what they rise from each time to the next."""
    errors = outputs - targets
    slopes = errors[:, 1:] - errors[:, :-1]
    return reduced(errors.square().mean((1, 2)) + ROUGH * slopes.square().mean((1, 2)), reduction)


def near_huber(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Absolute errors, but squared ones near 0 (Girshick, 2015)."""
    errors = F.smooth_l1_loss(outputs, targets, beta=QUARTIC, reduction="none")
    return reduced(errors.mean(1), reduction)


def balanced_stages(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy, in which the time behind a change counts twice."""
    entropy = F.cross_entropy(outputs, targets, reduction="none")
    has_changed = F.pad(targets[:, 1:] != targets[:, :-1], (1, 0)).to(outputs.dtype)
    return reduced(((1 + has_changed) * entropy).mean(1), reduction)


def explained(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Share of each series' variance that isn't explained."""
    errors = (outputs - targets).square().flatten(1).sum(1)
    centred = targets - targets.mean(2, keepdim=True)
    return reduced(errors / centred.square().flatten(1).sum(1), reduction)


def distance(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """How far apart points are."""
    return reduced(torch.linalg.vector_norm(outputs - targets + 1e-6, dim=1), reduction)
