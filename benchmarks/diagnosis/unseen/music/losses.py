"""Losses for music, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced


def bounded_pairs(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Labels above zero and the others below it, by log-sum-exp (Su et al., 2022)."""
    present = torch.where(targets > 0, -outputs, -torch.inf)
    absent = torch.where(targets > 0, -torch.inf, outputs)
    zero = (1, 0)
    losses = F.pad(present, zero).logsumexp(1) + F.pad(absent, zero).logsumexp(1)
    return reduced(losses, reduction)
