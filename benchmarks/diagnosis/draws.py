"""How samples are drawn and divided into those to train on and those to validate on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Samples: TypeAlias = tuple[Tensor, Tensor]
"""Inputs ``[n, ...]`` and targets ``[n, ...]``."""


@dataclass(frozen=True)
class Split:
    """Samples to train on, and others to validate on; samples are rows."""

    inputs: Tensor
    targets: Tensor
    valid_inputs: Tensor
    valid_targets: Tensor


def divided(draw: Callable[[int], Samples], trained: int, seed: int) -> Split:
    """``trained`` samples of ``draw(n)`` to train on, and a quarter of that number to validate on.

    ``draw`` uses torch's global random numbers, whose state is restored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs, targets = draw(trained + trained // 4)
    return Split(inputs[:trained], targets[:trained], inputs[trained:], targets[trained:])


def fixed(seed: int, *shape: int) -> Tensor:
    """Normal numbers that belong to a task and are the same for each seed of the data."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform(low: float, high: float, *shape: int) -> Tensor:
    """Numbers between ``low`` and ``high``."""
    return low + (high - low) * torch.rand(shape)


def noisy(values: Tensor, deviation: float) -> Tensor:
    """The values plus normal noise."""
    return values + deviation * torch.randn_like(values)


def standardised(values: Tensor) -> Tensor:
    """Values whose mean over the samples is 0 and whose standard deviation is 1."""
    return (values - values.mean(0)) / values.std(0)


def pixels(side: int) -> tuple[Tensor, Tensor]:
    """Row and column of each pixel, ``[side, side]`` each, from -1 to 1."""
    axis = torch.linspace(-1, 1, side)
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    return rows, columns
