"""How the data of the development problems are drawn and divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.diagnosis.problem import Split

Samples: TypeAlias = tuple[Tensor, Tensor]
"""Inputs ``[n, ...]`` and targets ``[n, ...]``."""


def divided(draw: Callable[[int], Samples], trained: int, seed: int) -> Split:
    """``trained`` samples of ``draw(n)`` to train on, and a quarter of that number to validate on.

    ``draw`` uses torch's global random numbers, which are left as they were.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs, targets = draw(trained + trained // 4)
    return Split(inputs[:trained], targets[:trained], inputs[trained:], targets[trained:])


def uniform(low: float, high: float, *shape: int) -> Tensor:
    """Numbers between ``low`` and ``high``."""
    return low + (high - low) * torch.rand(shape)


def noisy(values: Tensor, deviation: float) -> Tensor:
    """The values with normal noise."""
    return values + deviation * torch.randn_like(values)
