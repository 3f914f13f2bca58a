"""Losses for tables, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

USUAL = 1.0
"""Logarithm of a usual time."""
SHARPEST = 2.5
"""Logarithm of the density that counts as none to lose."""
LIMIT = 4.0
"""Logarithms of parameters of distributions are kept between minus this and this."""


def limited(logarithms: Tensor) -> Tensor:
    """Smoothly between ``-LIMIT`` and ``LIMIT``."""
    return LIMIT * (logarithms / LIMIT).tanh()


def weibull(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of Weibull times, which are partly censored (Martinsson, 2016).

    ``outputs`` are logarithms of scale and shape, the former counted from ``USUAL``; ``targets``
    are times and whether it happened.
    """
    scale, shape = limited(outputs).unbind(1)
    time, happened = targets.unbind(1)
    relative = time.log() - scale - USUAL
    survived = (shape.exp() * relative).clamp(max=10).exp()
    density = shape + shape.exp() * relative - time.log()
    return reduced(survived - happened * density, reduction)


def hurdle(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of nothing, or else of a log-normal amount (Cragg, 1971).

    ``outputs`` are a logit, a mean and a logarithmic deviation.
    """
    logit, mean, deviation = outputs.unbind(1)
    amount = targets[:, 0]
    is_some = (amount > 0).to(outputs.dtype)
    logarithm = torch.where(amount > 0, amount, 1.0).log()
    distance = (logarithm - mean) * (-limited(deviation)).exp()
    whether = F.binary_cross_entropy_with_logits(logit, is_some, reduction="none")
    return reduced(whether + is_some * (distance.square() / 2 + limited(deviation)), reduction)


def list_divergence(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Kullback-Leibler divergence of shares from the scores' softmax (Cao et al., 2007)."""
    divergence = F.kl_div(outputs.log_softmax(1), targets, reduction="none")
    return reduced(divergence.sum(1), reduction)


def two_tasks(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Squared errors of the first task and absolute ones of the second."""
    errors = outputs - targets
    return reduced(errors[:, 0].square() + errors[:, 1].abs(), reduction)


def beta_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of beta distributions (Ferrari and Cribari-Neto, 2004).

    ``outputs`` are logarithms of both parameters. ``SHARPEST`` is added, for densities of shares
    are above 1.
    """
    first, second = limited(outputs).exp().unbind(1)
    share = targets[:, 0]
    normaliser = first.lgamma() + second.lgamma() - (first + second).lgamma()
    density = (first - 1) * share.log() + (second - 1) * (1 - share).log() - normaliser
    return reduced(SHARPEST - density, reduction)


def preferred(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """The logistic loss of a difference that should be positive (Rendle et al., 2009)."""
    return reduced(F.softplus(-targets * outputs).mean(1), reduction)
