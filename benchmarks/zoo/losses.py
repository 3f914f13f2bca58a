"""Losses and data that many networks of the zoo share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.zoo.network import Batch

CLASSES = 3
WORDS = 13


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of ``model`` of all others ``[N, K]`` and labels ``y`` ``[N]``."""
    inputs = (value for key, value in batch.items() if key != "y")
    return cross_entropy(model(*inputs), batch["y"])


def drawn(**draws: Callable[[], Any]) -> Callable[[], Batch]:
    """Each draw under its name."""
    return lambda: {name: draw() for name, draw in draws.items()}


def normal(*shape: int) -> Callable[[], Tensor]:
    """Draws of normal numbers."""
    return partial(torch.randn, *shape, dtype=torch.float64)


def integers(below: int, *shape: int) -> Callable[[], Tensor]:
    """Draws of integers from zero."""
    return partial(torch.randint, below, shape)


def numbers(samples: int, *shape: int) -> Callable[[], Batch]:
    """Random numbers ``[N, *shape]`` with a label for each sample."""
    return drawn(x=normal(samples, *shape), y=integers(CLASSES, samples))
