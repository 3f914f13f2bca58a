"""Losses for text, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.diagnosis.development.reduction import reduced


def random_field(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of tags ``[N, T]`` by a conditional random field, for each word.

    ``outputs`` ``[N, T + K, K]`` are the scores of the words' tags and, behind them, those of tags
    that follow a tag, which are the same for all sentences (Lafferty et al., 2001).
    """
    length = targets.shape[1]
    words, follows = outputs[:, :length], outputs[:, length:]
    own = words.gather(2, targets[..., None]).sum((1, 2))
    samples = torch.arange(len(targets))[:, None]
    path = own + follows[samples, targets[:, :-1], targets[:, 1:]].sum(1)
    total = words[:, 0]
    for scores in words[:, 1:].unbind(1):
        total = (total[..., None] + follows).logsumexp(1) + scores
    return reduced((total.logsumexp(1) - path) / length, reduction)
