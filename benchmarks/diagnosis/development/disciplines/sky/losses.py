"""Losses for astronomy, with the reductions of PyTorch's."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced


def earth_movers(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared differences of cumulated shares of ordered classes (Hou et al., 2016)."""
    true = F.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
    difference = (outputs.softmax(1) - true).cumsum(1)
    return reduced(difference.square().sum(1), reduction)


def several_scales(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared errors of pixels, and of means over two by two and four by four of them."""
    errors = outputs - targets
    means = [errors, F.avg_pool2d(errors, 2), F.avg_pool2d(errors, 4)]
    losses = [each.square().flatten(1).mean(1) for each in means]
    return reduced(losses[0] + losses[1] + losses[2], reduction)
