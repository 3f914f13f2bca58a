"""Losses for farms, with the reductions of PyTorch's."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.disciplines.farming import data

MARGIN = 0.15
"""By how much a cosine has to be larger than the others."""
SHARPNESS = 8.0
"""What cosines are multiplied by."""


def one_peaked(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of binomial shares of ordered classes (Beckham and Pal, 2017).

    ``outputs`` are a logit of where the peak is, and how sharp it is before that is made positive.
    """
    place, sharp = outputs.unbind(1)
    most = data.STAGES - 1
    stages = torch.arange(data.STAGES, device=outputs.device)
    ways = torch.tensor([math.log(math.comb(most, stage)) for stage in range(data.STAGES)])
    below = (most - stages) * F.logsigmoid(-place)[:, None]
    above = stages * F.logsigmoid(place)[:, None]
    logits = (ways.to(outputs) + above + below) * F.softplus(sharp)[:, None]
    return F.cross_entropy(logits, targets, reduction=reduction)


def large_margin(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of cosines, the true one of which is made smaller (Wang et al., 2018)."""
    true = F.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
    return F.cross_entropy(SHARPNESS * (outputs - MARGIN * true), targets, reduction=reduction)
