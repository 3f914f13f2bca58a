"""Losses for images, with the reductions of PyTorch's."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

WIDE, CURVED = 0.4, 0.1
"""Errors up to which the wing loss is a logarithm, and how strongly it bends at 0."""
PRESENT, ABSENT, REDUCED = 0.9, 0.1, 0.5
"""Least and largest lengths of capsules, and the weight of absent ones (Sabour et al., 2017)."""
SHARPNESS = 5.0
"""Differences of similarities are multiplied by it."""


def polynomial_entropy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy plus one minus the true class's share (Leng et al., 2022)."""
    entropy = F.cross_entropy(outputs, targets, reduction="none")
    return reduced(entropy + 1 - (-entropy).exp(), reduction)


def jaccard(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """One minus the intersection over the union of each image, from logits."""
    shares, truth = outputs.sigmoid().flatten(1), targets.flatten(1)
    both = (shares * truth).sum(1)
    return reduced(1 - (both + 1) / ((shares + truth).sum(1) - both + 1), reduction)


def wing(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Logarithms of small errors and absolute values of large ones (Feng et al., 2018)."""
    errors = (outputs - targets).abs()
    shift = WIDE - WIDE * math.log1p(WIDE / CURVED)
    small = WIDE * (errors / CURVED).log1p()
    return reduced(small.where(errors < WIDE, errors - shift).flatten(1).mean(1), reduction)


def margins(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared distances of the classes' lengths from where they should be."""
    is_class = F.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
    missed = (PRESENT - outputs).clamp(min=0).square()
    wrong = (outputs - ABSENT).clamp(min=0).square()
    return reduced((is_class * missed + REDUCED * (1 - is_class) * wrong).sum(1), reduction)


def triplets(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """The second of three should be nearer to the first than the third (Hermans et al., 2017)."""
    anchor, same, other = outputs.unbind(1)
    difference = (anchor * other).sum(1) - (anchor * same).sum(1)
    return reduced(F.softplus(SHARPNESS * difference), reduction)


def hinge(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """How far scores are from being above 1 or below -1 (Lim and Ye, 2017)."""
    return reduced((1 - targets * outputs).clamp(min=0).flatten(1).mean(1), reduction)
