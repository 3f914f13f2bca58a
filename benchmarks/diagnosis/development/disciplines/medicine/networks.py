"""Networks for medicine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import SelfAttention
from benchmarks.diagnosis.development.residual import Residual


def volume_network(width: int = 6, classes: int = 3) -> nn.Module:
    """Convolutions over volumes (Maturana and Scherer, 2015)."""
    return nn.Sequential(
        *(nn.Conv3d(1, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.LeakyReLU(0.1)),
        nn.MaxPool3d(2),
        *(nn.Conv3d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm3d(2 * width)),
        *(nn.LeakyReLU(0.1), nn.MaxPool3d(2), nn.Flatten()),
        *(nn.Linear(36 * width, 32), nn.LeakyReLU(0.1), nn.Dropout(0.2), nn.Linear(32, classes)),
    )


class SegNet(nn.Module):
    """What is pooled goes back to where it was the largest (Badrinarayanan et al., 2017)."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.pool, self.spread = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.down_first = self._layer(1, width)
        self.down_second = self._layer(width, 2 * width)
        self.up_second = self._layer(2 * width, width)
        self.up_first = self._layer(width, width)
        self.head = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _layer(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            *(nn.BatchNorm2d(outside), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, first_places = self.pool(self.down_first(x))
        second, second_places = self.pool(self.down_second(first))
        up = self.up_second(self.spread(second, second_places))
        return self.head(self.up_first(self.spread(up, first_places)))


class ColumnTransformer(nn.Module):
    """Each column as a token, and one more that is read (Gorishniy et al., 2021)."""

    def __init__(self, columns: int = 12, width: int = 16, outputs: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(columns, width) / width**0.5)
        self.reader = nn.Parameter(torch.randn(1, width) / width**0.5)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    Residual(nn.LayerNorm(width), SelfAttention(width, 4)),
                    Residual(
                        *(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU()),
                        *(nn.Dropout(0.1), nn.Linear(2 * width, width)),
                    ),
                )
                for _ in range(2)
            )
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        columns = x[..., None] * self.weight + self.bias
        tokens = torch.cat([self.reader.expand(len(x), -1, -1), columns], 1)
        return self.head(self.layers(tokens)[:, 0])


def risk_network(inputs: int = 10, width: int = 40) -> nn.Module:
    """Logarithm of a patient's risk (Katzman et al., 2018)."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Dropout(0.1)),
        *(nn.Linear(width, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Dropout(0.1)),
        nn.Linear(width, 1, bias=False),
    )


class ShortAndLong(nn.Module):
    """A memory of all times, one of each sixth time, and a straight line (Lai et al., 2018)."""

    def __init__(self, width: int = 20, future: int = 4, skip: int = 6, last: int = 8) -> None:
        super().__init__()
        self.skip, self.last = skip, last
        self.near = nn.Sequential(nn.Conv1d(3, width, 5, padding=2), nn.ReLU(), nn.Dropout(0.1))
        self.memory = nn.GRU(width, width, batch_first=True)
        self.sparse_memory = nn.GRU(width, width // 4, batch_first=True)
        self.head = nn.Linear(width + skip * (width // 4), future)
        self.straight = nn.Linear(last, future)

    def forward(self, x: Tensor) -> Tensor:
        near = self.near(x.transpose(1, 2)).transpose(1, 2)
        steady = self.memory(near)[0][:, -1]
        phases = near.unflatten(1, (-1, self.skip)).transpose(1, 2).flatten(0, 1)
        sparse = self.sparse_memory(phases)[0][:, -1].unflatten(0, (len(x), -1)).flatten(1)
        return self.head(torch.cat([steady, sparse], 1)) + self.straight(x[:, -self.last :, 0])


class DoseMixture(nn.Module):
    """Experts' doses, weighted by a gate."""

    def __init__(self, inputs: int = 9, width: int = 24, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 1))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        doses = torch.cat([expert(x) for expert in self.experts], 1)
        return (weights * doses).sum(1, keepdim=True)
