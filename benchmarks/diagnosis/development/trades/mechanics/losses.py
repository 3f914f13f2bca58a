"""Losses for equations and codes, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.diagnosis.development.reduction import reduced

HALF = 0.3
"""Squared error at which the Geman-McClure loss is half of its largest value."""
LATER = 0.9
"""An error counts so much less than that of the time before."""
FALSE = 0.1
"""Weight of the mean size of codes."""


def relative_norm(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Length of the error of a function relative to the function's own (Li et al., 2021)."""
    errors = torch.linalg.vector_norm((outputs - targets).flatten(1) + 1e-6, dim=1)
    return reduced(errors / (torch.linalg.vector_norm(targets.flatten(1), dim=1) + 0.1), reduction)


def geman(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared errors that never count more than 1 (Geman and McClure, 1985)."""
    squared = (outputs - targets).square()
    return reduced((squared / (squared + HALF)).mean(1), reduction)


def power(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """The power 1.5 of absolute errors: between absolute and squared ones."""
    errors = (outputs - targets).square()
    return reduced((errors + 1e-4).pow(0.75).mean(1), reduction)


def correlated(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """One minus the cosine of the angle between both, plus half of their mean squared distance."""
    cosine = torch.nn.functional.cosine_similarity(outputs, targets)
    return reduced(1 - cosine + (outputs - targets).square().mean(1) / 2, reduction)


def sparse_codes(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared errors of codes relative to the codes' squares, plus their mean size."""
    errors = (outputs - targets).square().sum(1) / targets.square().sum(1)
    return reduced(errors + FALSE * outputs.abs().mean(1), reduction)


def discounted(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared errors ``[N, T, D]``, of which later ones count less."""
    weights = LATER ** torch.arange(outputs.shape[1])
    return reduced(((outputs - targets).square().mean(2) * weights).mean(1), reduction)
