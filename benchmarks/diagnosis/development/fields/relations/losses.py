"""Losses for graphs, with the reductions of PyTorch's."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced


def logarithmic_cosine(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """The logarithm of the hyperbolic cosine of errors: squared if small, else absolute."""
    errors = outputs - targets
    losses = errors + F.softplus(-2 * errors) - math.log(2)
    return reduced(losses.flatten(1).mean(1), reduction)
