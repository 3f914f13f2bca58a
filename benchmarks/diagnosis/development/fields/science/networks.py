"""Networks for equations, operators, families of functions and decisions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.fields.science import data

STEP = 0.05
"""Distance of the places whose heights give the Laplacian."""


class PhysicsInformed(nn.Module):
    """A height at places ``[2]``, and its Laplacian by differences: ``[N, 2]``."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.height = nn.Sequential(
            *(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
            *(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        around = STEP * torch.tensor([[0.0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
        heights = self.height(x[:, None] + around)[..., 0]
        laplacian = (heights[:, 1:].sum(1) - 4 * heights[:, 0]) / STEP**2
        return torch.stack([heights[:, 0], laplacian], 1)


class DeepOperator(nn.Module):
    """Products of what a function and a place are mapped to (Lu et al., 2021)."""

    def __init__(self, width: int = 40, size: int = 24) -> None:
        super().__init__()
        self.branch, self.trunk = (
            nn.Sequential(
                *(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()),
                nn.Linear(width, size),
            )
            for inputs in (data.SENSORS, 1)
        )
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        values, where = x.tensor_split([data.SENSORS], 1)
        return (self.branch(values) * self.trunk(where)).sum(1, keepdim=True) + self.bias


class DuelingNetwork(nn.Module):
    """Values of actions, as a state's value and advantages of each (Wang et al., 2016)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.shared = nn.Sequential(
            *(nn.Linear(data.STATE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        )
        self.value, self.advantage = nn.Linear(width, 1), nn.Linear(width, data.ACTIONS)

    def forward(self, x: Tensor) -> Tensor:
        states = self.shared(x.unflatten(1, (2, data.STATE)))
        advantages = self.advantage(states)
        return self.value(states) + advantages - advantages.mean(2, keepdim=True)


class HyperNetwork(nn.Module):
    """A network's weights for the last input are computed of the others (Ha et al., 2017)."""

    def __init__(self, inputs: int = 4, width: int = 40, inner: int = 8) -> None:
        super().__init__()
        self.weights = nn.Sequential(
            *(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU()),
            *(nn.Linear(width, 3 * inner), nn.Unflatten(1, (3, inner))),
        )
        self.offsets = nn.Parameter(torch.linspace(-2, 2, inner))
        self.activation = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        slopes, biases, outer = self.weights(x[:, :-1]).unbind(1)
        hidden = self.activation((1 + slopes) * x[:, -1:] + biases + self.offsets)
        return (outer * hidden).sum(1, keepdim=True)
