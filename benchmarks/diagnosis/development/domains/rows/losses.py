"""Losses for tables, with the reductions of PyTorch's."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

BALANCE = 0.1
"""Weight of the balance loss; with the 0.01 of Fedus et al., 2022, some experts go unused."""
FRAUDS = 6.0
"""A fraud weighs as much as so many other payments, of which there are about as many."""


def balanced_regression(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared error, and Fedus et al.'s loss (2022, eq. 4) by which experts are used equally.

    ``outputs`` are a prediction and the gate's probabilities, ``[N, 1 + experts]``.
    """
    predictions, probabilities = outputs[:, :1], outputs[:, 1:]
    experts = probabilities.shape[1]
    used = F.one_hot(probabilities.argmax(1), experts).float().mean(0)
    balance = experts * (used * probabilities).sum(1, keepdim=True)
    return reduced((predictions - targets).square() + BALANCE * balance, reduction)


def mixture_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of a mixture of diagonal Gaussians (Bishop, 1994).

    ``outputs`` ``[N, parts, 1 + 2 D]`` are logits, means and logarithmic deviations for targets
    ``[N, D]``.
    """
    size = targets.shape[1]
    logits, means, deviations = outputs.split([1, size, size], 2)
    distances = (targets[:, None] - means) * (-deviations).exp()
    densities = -distances.square() / 2 - deviations - math.log(2 * math.pi) / 2
    return reduced(-(logits[..., 0].log_softmax(1) + densities.sum(2)).logsumexp(1), reduction)


def pairwise_logistic(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """RankNet's loss (Burges et al., 2005) of scores ``[N, results]``, over all pairs of results.

    The better one of each pair should have the larger score.
    """
    is_better = (targets[:, :, None] > targets[:, None, :]).float()
    losses = F.softplus(outputs[:, None, :] - outputs[:, :, None]) * is_better
    return reduced(losses.sum((1, 2)) / is_better.sum((1, 2)).clamp(min=1), reduction)


def weighted_classes(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in which the second class has a larger weight than the first."""
    return F.cross_entropy(outputs, targets, torch.tensor([1.0, FRAUDS]), reduction=reduction)
