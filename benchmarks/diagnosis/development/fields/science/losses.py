"""Losses of equations, operators and decisions, with the reductions of PyTorch's."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

EDGE = 5.0
"""Weight of the squared height at the edge, where it should be 0."""
PATIENCE = 0.7
"""What a reward counts one move later."""


def poisson(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared residuals of an equation, and squared heights at the edge (Raissi et al., 2019).

    ``outputs`` are heights and their Laplacians, ``[N, 2]``.
    """
    height, laplacian = outputs.unbind(1)
    load, is_edge = targets.unbind(1)
    losses = is_edge * EDGE * height.square() + (1 - is_edge) * (laplacian + load).square()
    return reduced(losses, reduction)


def relative(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Absolute errors, relative to one more than the target's size."""
    errors = (outputs - targets).abs() / (1 + targets.abs())
    return reduced(errors.mean(1), reduction)


def temporal_difference(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """How far a move's value is from its reward and the best value behind it (Mnih et al., 2015).

    ``outputs`` ``[N, 2, actions]`` are the values of actions before and after the move.
    """
    now, later = outputs.unbind(1)
    value = now.gather(1, targets[:, :1].long())[:, 0]
    goal = targets[:, 1] + PATIENCE * later.detach().amax(1)
    return reduced(F.huber_loss(value, goal, reduction="none"), reduction)


def cauchy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Logarithms of one more than squared errors (Barron, 2019)."""
    return reduced(((outputs - targets) / 0.5).square().log1p().mean(1), reduction)
