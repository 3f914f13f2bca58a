"""Losses for tables, with the reductions of PyTorch's."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

MARGIN = 1.0
"""How far apart samples of different classes should be; embeddings have a length of 1."""


def ordinal(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Whether a grade is above each of the others, from logits ``[N, grades - 1]``.

    Cao et al., 2020.
    """
    is_above = (targets[:, None] > torch.arange(outputs.shape[1])).to(outputs.dtype)
    losses = F.binary_cross_entropy_with_logits(outputs, is_above, reduction="none")
    return reduced(losses.mean(1), reduction)


def list_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of an order, by scores ``[N, offers]`` (Xia et al., 2008)."""
    scores = outputs.gather(1, targets).flip(1)
    return reduced((scores.logcumsumexp(1) - scores).mean(1), reduction)


def hazards(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of survival in periods, from the logits of each period's hazard.

    ``targets`` are the last period and whether it ended with the event (Kvamme and Borgan, 2021).
    """
    last, is_event = targets[:, :1], targets[:, 1:]
    periods = torch.arange(outputs.shape[1])
    happened = is_event * (periods == last)
    losses = F.binary_cross_entropy_with_logits(outputs, happened, reduction="none")
    return reduced((losses * (periods <= last)).sum(1), reduction)


def ranked_probability(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Continuous ranked probability score of normal distributions (Gneiting et al., 2005).

    ``outputs`` are a mean and a logarithmic deviation.
    """
    mean, logarithm = outputs.split(1, 1)
    deviation = logarithm.exp()
    distance = (targets - mean) / deviation
    density = (-distance.square() / 2).exp() / math.sqrt(2 * math.pi)
    score = distance * (distance / math.sqrt(2)).erf() + 2 * density - 1 / math.sqrt(math.pi)
    return reduced(deviation * score, reduction)


def tweedie(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Deviance of Tweedie's distributions (1984) of power 1.5, from logarithms of the mean."""
    root = (outputs / 2).exp()
    return reduced(4 * (targets / root + root - 2 * targets.sqrt()), reduction)


def contrastive(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Pairs of a class should be near, and others far from each other (Hadsell et al., 2006).

    Both kinds of pairs count the same.
    """
    is_same = (targets[:, None] == targets).float() - torch.eye(len(targets))
    is_other = (targets[:, None] != targets).float()
    squared = (outputs[:, None] - outputs).square().sum(2)
    near = squared * is_same
    far = (MARGIN - (squared + 1e-6).sqrt()).clamp(min=0).square() * is_other
    losses = (near / is_same.mean().clamp(min=1e-6) + far / is_other.mean()).mean(1)
    return reduced(losses, reduction)
