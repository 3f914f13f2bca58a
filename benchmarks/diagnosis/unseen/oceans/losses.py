"""Losses for the oceans, with the reductions of PyTorch's."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced


def turned(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """One less the cosine of the angle to the true direction."""
    return reduced(1 - F.cosine_similarity(outputs, targets, 1), reduction)


def laplace_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Of medians and the logarithms of their scales, up to a constant."""
    median, scale = outputs.chunk(2, 1)
    losses = (targets - median).abs() * (-scale).exp() + scale
    return reduced(losses.sum(1), reduction)
