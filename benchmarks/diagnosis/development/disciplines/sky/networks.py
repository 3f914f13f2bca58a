"""Networks for astronomy."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.disciplines.sky import data
from benchmarks.diagnosis.development.residual import Residual


class TransitNetwork(nn.Module):
    """Convolutions of the whole curve and of its middle (Shallue and Vanderburg, 2018)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.whole = nn.Sequential(
            *(nn.Conv1d(1, width, 5, padding=2), nn.ReLU(), nn.MaxPool1d(4)),
            *(nn.Conv1d(width, 2 * width, 5, padding=2), nn.ReLU(), nn.MaxPool1d(4), nn.Flatten()),
        )
        self.middle = nn.Sequential(
            *(nn.Conv1d(1, width, 5, padding=2), nn.ReLU(), nn.MaxPool1d(4), nn.Flatten()),
        )
        self.head = nn.Sequential(
            nn.Linear(2 * width * data.GLOBAL // 16 + width * data.LOCAL // 4, 32),
            *(nn.ReLU(), nn.Linear(32, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        whole, middle = x[:, None].split([data.GLOBAL, data.LOCAL], 2)
        return self.head(torch.cat([self.whole(whole), self.middle(middle)], 1))


def spectral_network(width: int = 12, outputs: int = 3) -> nn.Module:
    """Residual blocks with normalisation and activation in front (He et al., 2016b)."""

    def block() -> nn.Module:
        return Residual(
            *(nn.BatchNorm1d(width), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1, bias=False)),
            *(nn.BatchNorm1d(width), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1, bias=False)),
        )

    return nn.Sequential(
        *(nn.Conv1d(1, width, 5, padding=2), block(), nn.AvgPool1d(2), block(), nn.AvgPool1d(2)),
        *(nn.BatchNorm1d(width), nn.ReLU(), nn.Flatten(), nn.Linear(16 * width, outputs)),
    )


class DenseRows(nn.Module):
    """Each layer sees the outputs of all before it."""

    def __init__(
        self, inputs: int = 8, growth: int = 16, layers: int = 3, outputs: int = 12
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs + growth * layer, growth), nn.LeakyReLU(0.01))
            for layer in range(layers)
        )
        self.head = nn.Linear(inputs + growth * layers, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(x)


class TurnedViews(nn.Module):
    """The same convolutions see four turns of an image (Dieleman et al., 2015)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 4, 2, 1), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(32 * width, 24), nn.ReLU()),
        )
        self.head = nn.Sequential(nn.Linear(96, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        turns = [self.features(x.rot90(quarters, (2, 3))) for quarters in range(4)]
        return self.head(torch.cat(turns, 1))


class TimeAttention(nn.Module):
    """Queries attend to observations at any times, which are periodic features.

    They are those of Kazemi et al., 2019, and of Shukla and Marlin, 2021.
    """

    def __init__(self, width: int = 32, queries: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.paces = nn.Linear(1, width // 2)
        nn.init.uniform_(self.paces.weight, -math.pi, math.pi)
        self.embed = nn.Sequential(nn.Linear(width // 2 + 3, width), nn.Tanh())
        self.queries = nn.Parameter(torch.randn(queries, width) / width**0.5)
        self.keys, self.values = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Sequential(
            *(nn.Flatten(), nn.Linear(queries * width, width), nn.Tanh(), nn.Linear(width, classes))
        )

    def forward(self, x: Tensor) -> Tensor:
        observed = self.embed(torch.cat([self.paces(x[..., :1]).sin(), x], 2))
        scores = self.queries @ self.keys(observed).transpose(1, 2) / observed.shape[2] ** 0.5
        return self.head(scores.softmax(2) @ self.values(observed))


class DenseResidual(nn.Module):
    """Convolutions that see all before them, the merged outputs of which are added."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width + growth * layer, growth, 3, padding=1), nn.PReLU())
            for layer in range(2)
        )
        self.merge = nn.Conv2d(width + 2 * growth, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = x
        for layer in self.layers:
            seen = torch.cat([seen, layer(seen)], 1)
        return x + self.merge(seen)


def cleaner(width: int = 8, growth: int = 6) -> nn.Module:
    """Zhang et al., 2018, with two blocks."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 5, padding=2), nn.PReLU()),
        *(DenseResidual(width, growth), DenseResidual(width, growth)),
        nn.Conv2d(width, 1, 3, padding=1),
    )
