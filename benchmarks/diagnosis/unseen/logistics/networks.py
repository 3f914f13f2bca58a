"""Networks for logistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import Attention, SelfAttention
from benchmarks.diagnosis.development.residual import Residual
from benchmarks.diagnosis.unseen.logistics import data


class Transposed(nn.Module):
    """The last two dimensions change places."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class TourNetwork(nn.Module):
    """Stops that see each other, and a pointer with bounded scores (Kool et al., 2019)."""

    def __init__(self, inputs: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.encoder = nn.Sequential(
            *(Residual(SelfAttention(width, 4)), Transposed(), nn.BatchNorm1d(width)),
            *(Transposed(), Residual(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))),
            *(Transposed(), nn.BatchNorm1d(width), Transposed()),
        )
        self.glimpse = Attention(width, 4)
        self.bound = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        stops = self.encoder(self.embed(x))
        query = self.glimpse(stops.mean(1, keepdim=True), stops)
        scores = (query * stops).sum(2) / stops.shape[2] ** 0.5
        return 10 * self.bound(scores / 2)


class BicycleNetwork(nn.Module):
    """Convolutions over time and town, which change the last map."""

    def __init__(self, times: int = 6, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv3d(2, width, 3, padding=(0, 1, 1)), nn.GroupNorm(3, width), nn.GELU()),
            *(nn.Conv3d(width, width, 3, padding=(0, 1, 1)), nn.GroupNorm(3, width), nn.GELU()),
            nn.Conv3d(width, 1, (times - 4, 3, 3), padding=(0, 1, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, 0, 0]


class LorryNetwork(nn.Module):
    """Residual blocks with normalised branches and dropout (Gorishniy et al., 2021)."""

    def __init__(self, size: int = 4, width: int = 32) -> None:
        super().__init__()
        self.haulier = nn.Embedding(data.HAULIERS, size)
        self.depot = nn.Embedding(data.DEPOTS, size)
        self.layers = nn.Sequential(
            nn.Linear(2 * size + 6, width),
            *(
                Residual(
                    *(nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU()),
                    *(nn.Dropout(0.1), nn.Linear(2 * width, width)),
                )
                for _ in range(2)
            ),
            *(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        haulier, depot = self.haulier(x[:, 0].long()), self.depot(x[:, 1].long())
        return self.layers(torch.cat([haulier, depot, x[:, 2:]], 1))


class StackNetwork(nn.Module):
    """A memory that goes up each stack, and numbers that are added over stacks."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.memory = nn.GRU(1, size, batch_first=True)
        self.stack = nn.Sequential(
            *(nn.Linear(size, size), nn.LeakyReLU(0.1), nn.Linear(size, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        last = self.memory(x.flatten(0, 1)[..., None])[1][0]
        return self.stack(last).unflatten(0, x.shape[:2]).sum(1)


class WarehouseNetwork(nn.Module):
    """A score of each warehouse, beside the mean of all of them."""

    def __init__(self, inputs: int = 6, width: int = 32) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU())
        self.score = nn.Sequential(
            *(nn.Linear(2 * width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        seen = self.look(x)
        others = seen.mean(1, keepdim=True).expand_as(seen)
        return self.score(torch.cat([seen, others], 2))[..., 0]


class CourierMixture(nn.Module):
    """Experts on normalised hidden units, beside a linear layer."""

    def __init__(self, inputs: int = 6, width: int = 32, experts: int = 3) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.LeakyReLU())
        self.linear = nn.Linear(inputs, 1)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.LeakyReLU(), nn.Linear(24, 1))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        minutes = torch.cat([expert(hidden) for expert in self.experts], 1)
        mixed = (self.gate(hidden).softmax(1) * minutes).sum(1, keepdim=True)
        return mixed + self.linear(x)
