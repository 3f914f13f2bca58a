"""Losses of generative models and autoencoders, with the reductions of PyTorch's."""

from __future__ import annotations

import math

from torch import Tensor

from benchmarks.diagnosis.development.reduction import reduced

SPARSITY = 0.02
"""Weight of the codes' mean."""


def flow_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood by a flow's values and logarithmic determinant, ``[N, D + 1]``."""
    values, determinant = outputs[:, :-1], outputs[:, -1]
    normal = values.square().sum(1) / 2 + values.shape[1] * math.log(2 * math.pi) / 2
    return reduced(normal - determinant, reduction)


def sparse_reconstruction(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared error of reconstructions ``[N, D]`` and mean of the codes that stand behind them."""
    size = targets.shape[1]
    errors = (outputs[:, :size] - targets).square().mean(1)
    return reduced(errors + SPARSITY * outputs[:, size:].abs().mean(1), reduction)
