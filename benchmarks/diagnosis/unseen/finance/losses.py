"""Losses for finance, with the reductions of PyTorch's."""

from __future__ import annotations

from torch import Tensor

from benchmarks.diagnosis.development.reduction import reduced


def gamma_deviance(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Half the deviance of gamma regression, of the mean's logarithm."""
    ratio = targets.log() - outputs
    return reduced((ratio.exp() - ratio - 1).sum(1), reduction)


def quasi_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Of a variance by its logarithm, in parts of squared returns (Patton, 2011)."""
    return reduced((outputs + targets * (-outputs).exp()).sum(1), reduction)
