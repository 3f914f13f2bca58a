"""The training run that both libraries track; imports neither of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STEPS, BATCH_SIZE, LEARNING_RATE = 12, 16, 0.1
BINS_1D, RANGE_1D = 50, (-0.5, 0.5)
BINS_2D, RANGE_2D = (20, 25), ((-0.3, 0.3), (-0.5, 0.5))


def network() -> nn.Sequential:
    """Small, seeded, and within what BackPACK's second-order rules support."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    """Images ``[N, 1, 8, 8]`` that tell something about their labels ``[N]``."""
    generator = torch.Generator().manual_seed(1)
    prototypes = torch.randn(5, 1, 8, 8, generator=generator)
    found = []
    for _ in range(STEPS):
        labels = torch.randint(5, (BATCH_SIZE,), generator=generator)
        noise = torch.randn(BATCH_SIZE, 1, 8, 8, generator=generator)
        found.append((prototypes[labels] + noise, labels))
    return found
