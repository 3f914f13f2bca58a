"""Networks for farms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.disciplines.farming import data


class PyramidPooling(nn.Module):
    """Means over parts of several sizes beside the features (Zhao et al., 2017)."""

    def __init__(self, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
        )
        self.parts = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Conv2d(width, width // 4, 1), nn.ReLU())
            for size in (1, 2, 4, 8)
        )
        self.head = nn.Conv2d(2 * width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.features(x)
        parts = [F.interpolate(part(seen), seen.shape[2:]) for part in self.parts]
        return self.head(torch.cat([seen, *parts], 1))


def network_in_network(width: int = 16, outputs: int = 2) -> nn.Module:
    """Convolutions of single pixels behind larger ones (Lin et al., 2014)."""

    def block(inside: int, outside: int, size: int) -> tuple[nn.Module, ...]:
        return (
            *(nn.Conv2d(inside, outside, size, padding=size // 2), nn.ReLU()),
            *(nn.Conv2d(outside, outside, 1), nn.ReLU()),
        )

    return nn.Sequential(
        *(*block(3, width, 5), nn.MaxPool2d(2), nn.Dropout(0.1)),
        *(*block(width, 2 * width, 3), nn.Conv2d(2 * width, outputs, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


class MemoryAndConvolutions(nn.Module):
    """A memory beside convolutions (Elsayed et al., 2018)."""

    def __init__(self, width: int = 12, size: int = 12, classes: int = 4) -> None:
        super().__init__()
        self.memory = nn.GRU(2, size, batch_first=True)
        self.convolutions = nn.Sequential(
            *(nn.Conv1d(2, width, 8, padding=4), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Conv1d(width, 2 * width, 5, padding=2), nn.BatchNorm1d(2 * width), nn.ReLU()),
            *(nn.Conv1d(2 * width, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.AdaptiveAvgPool1d(1), nn.Flatten()),
        )
        self.head = nn.Linear(size + width, classes)

    def forward(self, x: Tensor) -> Tensor:
        remembered = self.memory(x.transpose(1, 2))[0][:, -1]
        return self.head(torch.cat([remembered, self.convolutions(x)], 1))


class MuzzleNetwork(nn.Module):
    """Cosines of a print and of each animal (Wang et al., 2018)."""

    def __init__(self, width: int = 12, size: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.PReLU()),
            nn.MaxPool2d(2),
            *(nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width)),
            *(nn.PReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18 * width, size)),
        )
        self.animals = nn.Parameter(torch.randn(data.CATTLE, size))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(x), dim=1) @ F.normalize(self.animals, dim=1).T


class HarvestNetwork(nn.Module):
    """Convolutions over weeks, the features of which are scaled by what the soil says."""

    def __init__(self, width: int = 12, size: int = 32) -> None:
        super().__init__()
        self.weather = nn.Sequential(
            *(nn.Conv1d(2, width, 5, padding=2), nn.LeakyReLU(0.1), nn.AvgPool1d(2)),
            *(nn.Conv1d(width, width, 3, padding=1), nn.LeakyReLU(0.1), nn.Flatten()),
            *(nn.Linear(width * data.WEEKS // 2, size), nn.LayerNorm(size)),
        )
        self.scales = nn.Sequential(nn.Linear(5, size), nn.Sigmoid())
        self.soil = nn.Sequential(nn.Linear(5, size), nn.LeakyReLU(0.1))
        self.head = nn.Sequential(nn.Linear(2 * size, size), nn.LeakyReLU(0.1), nn.Linear(size, 1))

    def forward(self, x: Tensor) -> Tensor:
        weeks, soil = x.split([2 * data.WEEKS, 5], 1)
        weather = self.weather(weeks.unflatten(1, (2, data.WEEKS))) * self.scales(soil)
        return self.head(torch.cat([weather, self.soil(soil)], 1))


class SoilMixture(nn.Module):
    """Experts for each day, which a gate weights by the same embedding that they see."""

    def __init__(self, inputs: int = 4, width: int = 24, experts: int = 3) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(0.1), nn.Linear(width, 1))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        days = self.embed(x)
        weights = self.gate(days).softmax(2)
        moistures = torch.cat([expert(days) for expert in self.experts], 2)
        return (weights * moistures).sum(2)


class HiveNetwork(nn.Module):
    """Convolutions, then a memory of their features from frame to frame (Çakır et al., 2017)."""

    def __init__(self, width: int = 8, size: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ELU()),
            nn.MaxPool2d((4, 1)),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ELU()),
            nn.MaxPool2d((2, 1)),
        )
        self.memory = nn.GRU(2 * width, size, batch_first=True)
        self.head = nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.features(x).flatten(1, 2).transpose(1, 2)
        return self.head(self.memory(frames)[0].mean(1))
