"""Networks to measure on, with random data of the right shape.

The sizes are those of the DeepOBS networks (Schneider et al., 2019, arXiv:1903.05499).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    """``build()`` gives the network, ``shape`` is that of one sample."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 10

    def batch(self, n: int) -> tuple[Tensor, Tensor]:
        """Inputs ``[n, *shape]`` and labels ``[n]``."""
        return torch.randn(n, *self.shape), torch.randint(self.classes, (n,))


def logistic_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def mlp() -> nn.Module:
    widths = (784, 1000, 500, 100, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def c2d2() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(7 * 7 * 64, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


def c3d3() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(64, 96, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Flatten(), nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()),
        nn.Linear(256, 10),
    )


PROBLEMS: dict[str, Problem] = {
    "logistic regression": Problem(logistic_regression, (1, 28, 28)),
    "MLP": Problem(mlp, (1, 28, 28)),
    "2c2d": Problem(c2d2, (1, 28, 28)),
    "3c3d": Problem(c3d3, (3, 32, 32)),
}
