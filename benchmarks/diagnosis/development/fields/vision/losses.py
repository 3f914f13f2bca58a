"""Losses for images, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

FOCUS = 2.0
"""The exponent of Lin et al., 2017."""
OBJECTS = 6.0
"""A cell with an object weighs as much as so many without one, of which there are about as many."""
PLACES = 2.0
"""Weight of an object's place and size; Redmon et al., 2016, take 5."""
TOLERANCE = 0.05
"""Differences below it are squared, and larger ones count as they are."""
MISSED = 0.7
"""Weight of a missed pixel; a wrongly found one has the rest (Salehi et al., 2017)."""


def focal(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy with smaller weights for samples that are easy (Lin et al., 2017)."""
    entropy = F.cross_entropy(outputs, targets, reduction="none")
    return reduced((1 - (-entropy).exp()) ** FOCUS * entropy, reduction)


def detection(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Whether cells ``[N, 7, rows, columns]`` have an object, where it is, and of which class.

    After Redmon et al., 2016: the last two count in cells with an object only.
    """
    is_there, place, label = targets[:, 0], targets[:, 1:4], targets[:, 4].long()
    weights = torch.where(is_there > 0, OBJECTS, 1.0)
    found = F.binary_cross_entropy_with_logits(outputs[:, 0], is_there, weights, reduction="none")
    shift = F.smooth_l1_loss(outputs[:, 1:4], place, reduction="none").sum(1)
    kind = F.cross_entropy(outputs[:, 4:], label, reduction="none")
    of_objects = ((PLACES * shift + kind) * is_there).sum((1, 2)) / is_there.sum((1, 2))
    return reduced(found.mean((1, 2)) + of_objects, reduction)


def heatmaps(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared error of the maps of each stack ``[N, stacks, joints, rows, columns]``, by peak."""
    errors = (outputs - targets[:, None]).square().sum((3, 4)).mean((1, 2))
    return reduced(errors / targets.square().sum((2, 3)).mean(1), reduction)


def charbonnier(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """A smooth absolute error (Charbonnier et al., 1994)."""
    errors = ((outputs - targets).square() + TOLERANCE**2).sqrt() - TOLERANCE
    return reduced(errors.flatten(1).mean(1), reduction)


def tversky(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """One minus the overlap of each class, of each image (Salehi et al., 2017)."""
    shares = outputs.softmax(1).flatten(2)
    truth = F.one_hot(targets, outputs.shape[1]).permute(0, 3, 1, 2).flatten(2)
    both, missed = (shares * truth).sum(2), ((1 - shares) * truth).sum(2)
    wrong = (shares * (1 - truth)).sum(2)
    overlap = (both + 1) / (both + MISSED * missed + (1 - MISSED) * wrong + 1)
    return reduced(1 - overlap.mean(1), reduction)
