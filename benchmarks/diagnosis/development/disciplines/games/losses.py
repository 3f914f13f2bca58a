"""Losses for games, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced


def moves_and_worth(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Divergence of the moves from the best ones, and squared error (Silver et al., 2017)."""
    moves, worth = outputs.tensor_split([9], 1)
    best, true = targets.tensor_split([9], 1)
    divergence = F.kl_div(moves.log_softmax(1), best, reduction="none").sum(1)
    return reduced(divergence + (worth - true)[:, 0].square(), reduction)


def davidson(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of a win, a draw or a defeat (Davidson, 1970).

    ``outputs`` are the first one's lead and the logarithm of how likely draws are.
    """
    lead, draws = outputs.unbind(1)
    logits = torch.stack([-lead / 2, draws, lead / 2], 1)
    return F.cross_entropy(logits, targets, reduction=reduction)
