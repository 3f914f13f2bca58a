"""Losses of the development problems besides those of ``torch.nn.functional``.

Each is made of a function of outputs and targets that gives the losses of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere


def by_sample(losses: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A loss with the reductions of PyTorch's, of ``losses`` ``[N, ...]`` whose means count."""

    @wraps(losses)
    def loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        found = losses(outputs, targets)
        of_samples = found.flatten(1).mean(1) if found.ndim > 1 else found
        return of_samples.mean() if reduction == "mean" else of_samples.sum()

    return loss


def of_errors(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The mean of a function of each error, ``outputs - targets``."""
    return by_sample(lambda outputs, targets: function(outputs - targets))


# Of errors.

LEVELS = torch.tensor([0.1, 0.5, 0.9])
"""Shares of targets that are below each of three outputs."""
cauchy = of_errors(lambda e: (e / 0.5).square().log1p())
charbonnier = of_errors(lambda e: (e.square() + 0.05**2).sqrt() - 0.05)
geman = of_errors(lambda e: e.square() / (e.square() + 0.3))
log_cosh = of_errors(lambda e: e + F.softplus(-2 * e) - math.log(2))
pinball = of_errors(lambda e: torch.maximum((1 - LEVELS) * e, LEVELS * -e))
"""Quantile loss of three outputs."""
welsch = of_errors(lambda e: 1 - (-e.square() / 2).exp())


@by_sample
def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    """How far apart points are, whose coordinates are the last axis."""
    return torch.linalg.vector_norm(outputs - targets + 1e-6, dim=-1)


@by_sample
def relative_norm(outputs: Tensor, targets: Tensor) -> Tensor:
    """Length of the error of a function relative to the function's own (Li et al., 2021)."""
    errors = torch.linalg.vector_norm((outputs - targets).flatten(1) + 1e-6, dim=1)
    return errors / (torch.linalg.vector_norm(targets.flatten(1), dim=1) + 0.1)


@by_sample
def two_tasks(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the first output, and Huber loss of the second."""
    first = F.binary_cross_entropy_with_logits(outputs[:, 0], targets[:, 0], reduction="none")
    return first + F.huber_loss(outputs[:, 1], targets[:, 1], reduction="none")


# Likelihoods.


@by_sample
def evidence_bound(outputs: Tensor, targets: Tensor) -> Tensor:
    """Logits of pixels, and the codes' means and logarithmic variances behind them."""
    size = targets[0].numel()
    mean, variance = outputs[:, size:].chunk(2, 1)
    pixels = F.binary_cross_entropy_with_logits(
        outputs[:, :size], targets.flatten(1), reduction="none"
    )
    return pixels.sum(1) + ((mean**2 + variance.exp() - 1 - variance) / 2).sum(1)


# Classes.


@by_sample
def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with smaller weights for samples that are easy (Lin et al., 2017)."""
    entropy = F.cross_entropy(outputs, targets, reduction="none")
    return (1 - (-entropy).exp()) ** 2 * entropy


@by_sample
def large_margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of cosines, the true one of which is made smaller (Wang et al., 2018)."""
    true = F.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
    return F.cross_entropy(8 * (outputs - 0.15 * true), targets, reduction="none")


@by_sample
def ordinal(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether a grade is above each of the others, ``[N, grades - 1]`` (Cao et al., 2020)."""
    is_above = (targets[:, None] > torch.arange(outputs.shape[1])).to(outputs.dtype)
    return F.binary_cross_entropy_with_logits(outputs, is_above, reduction="none")


@by_sample
def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """How far scores are from being above 1 or below -1 (Lim and Ye, 2017)."""
    return (1 - targets * outputs).clamp(min=0)


@by_sample
def brier(outputs: Tensor, targets: Tensor) -> Tensor:
    """The squared distance of shares from what happened (Brier, 1950)."""
    return (outputs.sigmoid() - targets).square()


def weighted_classes(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in which the second of two classes has a larger weight than the first."""
    return F.cross_entropy(outputs, targets, outputs.new_tensor([1.0, 6.0]), reduction=reduction)


# Masks of images.


@by_sample
def entropy_and_overlap(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy plus Dice loss (Milletari et al., 2016) of each image."""
    entropy = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    shares, true = outputs.sigmoid().flatten(1), targets.flatten(1)
    dice = 1 - (2 * (shares * true).sum(1) + 1) / ((shares + true).sum(1) + 1)
    return entropy.flatten(1).mean(1) + dice


# Samples and others.


@by_sample
def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Pairs of a class should be near, and others far from each other (Hadsell et al., 2006)."""
    is_same = (targets[:, None] == targets).float() - torch.eye(len(targets))
    is_other = (targets[:, None] != targets).float()
    squared = (outputs[:, None] - outputs).square().sum(2)
    far = (1 - (squared + 1e-6).sqrt()).clamp(min=0).square() * is_other
    return squared * is_same / is_same.mean().clamp(min=1e-6) + far / is_other.mean()


# Equations and decisions.
