"""Losses for medicine, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

SMOOTH = 1.0
"""What is added to areas."""
SHIFT = 0.05
"""Probabilities of what doesn't hold count from here on."""
EASY = 2
"""The power by which small ones of them count less."""


def logarithmic_dice(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Logarithm of the hyperbolic cosine of the Dice loss of each image (Jadon, 2020)."""
    inside, is_inside = outputs.sigmoid().flatten(1), targets.flatten(1)
    overlap = 2 * (inside * is_inside).sum(1) + SMOOTH
    dice = 1 - overlap / (inside.sum(1) + is_inside.sum(1) + SMOOTH)
    return reduced(dice.cosh().log(), reduction)


def asymmetric(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Binary cross-entropy in which easy negatives count little (Ridnik et al., 2021)."""
    probable = outputs.sigmoid()
    shifted = (probable - SHIFT).clamp(min=0)
    holds = targets * F.logsigmoid(outputs)
    holds_not = (1 - targets) * shifted.pow(EASY) * (1 - shifted).clamp(min=1e-6).log()
    return reduced(-(holds + holds_not).sum(1), reduction)


def partial_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative logarithm of Cox's partial likelihood (1972), among those of the batch."""
    risk, (time, died) = outputs[:, 0], targets.unbind(1)
    is_seen = time >= time[:, None]
    of_all = risk.expand(len(risk), -1).masked_fill(~is_seen, -torch.inf).logsumexp(1)
    return reduced(died * (of_all - risk), reduction)


def low_matters(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared errors, which count twice where the target is low."""
    weights = 1 + (-2 * targets).sigmoid()
    return reduced((weights * (outputs - targets).square()).mean(1), reduction)
