"""Networks for series."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import SelfAttention
from benchmarks.diagnosis.development.residual import Residual


class SeveralWidths(nn.Module):
    """Convolutions of several lengths beside each other (Ismail Fawaz et al., 2020)."""

    def __init__(self, inside: int, each: int) -> None:
        super().__init__()
        self.shrink = nn.Conv1d(inside, each, 1, bias=False)
        self.branches = nn.ModuleList(
            nn.Conv1d(each, each, length, padding=length // 2, bias=False) for length in (3, 7, 15)
        )
        self.pooled = nn.Sequential(nn.MaxPool1d(3, 1, 1), nn.Conv1d(inside, each, 1, bias=False))
        self.norm = nn.Sequential(nn.BatchNorm1d(4 * each), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        shrunk = self.shrink(x)
        branches = [branch(shrunk) for branch in self.branches]
        return self.norm(torch.cat([*branches, self.pooled(x)], 1))


def inception_time(each: int = 6, classes: int = 5) -> nn.Module:
    """Ismail Fawaz et al., 2020, with three layers."""
    return nn.Sequential(
        *(SeveralWidths(3, each), SeveralWidths(4 * each, each), SeveralWidths(4 * each, each)),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4 * each, classes)),
    )


class GatedResidual(nn.Module):
    """A small network that may be switched off, added to its inputs (Lim et al., 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(width, width), nn.ELU(), nn.Linear(width, 2 * width), nn.GLU())
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.layers(x))


class ReturnForecaster(nn.Module):
    """Place, scale and degrees of freedom of the next value, by gates around a memory."""

    def __init__(self, inputs: int = 2, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(inputs, width), GatedResidual(width))
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Sequential(GatedResidual(width), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.recurrent(self.embed(x))
        return self.head(outputs[:, -1])


class PatchForecaster(nn.Module):
    """Pieces of each series as tokens (Nie et al., 2023), without its mean and deviation."""

    def __init__(self, past: int = 48, future: int = 12, width: int = 32, piece: int = 8) -> None:
        super().__init__()
        self.piece, pieces = piece, past // piece
        self.embed = nn.Linear(piece, width)
        self.places = nn.Parameter(0.02 * torch.randn(pieces, width))
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    Residual(nn.LayerNorm(width), SelfAttention(width, 4)),
                    Residual(
                        *(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()),
                        nn.Linear(2 * width, width),
                    ),
                )
                for _ in range(2)
            )
        )
        self.head = nn.Sequential(
            *(nn.LayerNorm(width), nn.Flatten(), nn.Linear(pieces * width, future))
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 0.1
        series = ((x - mean) / deviation).transpose(1, 2)
        tokens = self.embed(series.flatten(0, 1).unflatten(1, (-1, self.piece))) + self.places
        later = self.head(self.layers(tokens)).unflatten(0, (len(x), -1)).transpose(1, 2)
        return later * deviation + mean


class TrendAndRest(nn.Module):
    """A linear layer for a running mean and one for the rest (Zeng et al., 2023)."""

    def __init__(self, past: int = 32, future: int = 8, window: int = 9) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.ReplicationPad1d(window // 2), nn.AvgPool1d(window, 1))
        self.trend, self.rest = nn.Linear(past, future), nn.Linear(past, future)

    def forward(self, x: Tensor) -> Tensor:
        trend = self.mean(x[:, None])[:, 0]
        return self.trend(trend) + self.rest(x - trend)


def separable(width: int) -> nn.Module:
    """A convolution in each channel, then one over channels (Zhang et al., 2017)."""
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
        *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1, bias=False)),
        *(nn.BatchNorm2d(width), nn.ReLU()),
    )


def command_network(width: int = 24, classes: int = 6) -> nn.Module:
    """A network for keywords (Zhang et al., 2017)."""
    return nn.Sequential(
        nn.Conv2d(1, width, (4, 5), 2, (1, 2), bias=False),
        *(nn.BatchNorm2d(width), nn.ReLU(), separable(width), separable(width)),
        *(nn.AdaptiveAvgPool2d((2, 4)), nn.Flatten(), nn.Dropout(0.1)),
        nn.Linear(8 * width, classes),
    )


class SleepStager(nn.Module):
    """Features of each time, and a memory in both directions (Supratak et al., 2017)."""

    def __init__(self, inputs: int = 5, width: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.1), nn.Dropout(0.1))
        self.recurrent = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.shortcut = nn.Linear(width, 2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        outputs, _ = self.recurrent(features)
        return self.head(outputs + self.shortcut(features)).transpose(1, 2)


class PumpExperts(nn.Module):
    """Laws by which a series goes on, which a gate weights by a memory of it."""

    def __init__(self, width: int = 24, experts: int = 3, last: int = 4) -> None:
        super().__init__()
        self.last = last
        self.memory = nn.GRU(2, width, batch_first=True)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Flatten(), nn.Linear(2 * last, 16), nn.Tanh(), nn.Linear(16, 2))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.memory(x)
        weights = self.gate(outputs[:, -1]).softmax(1)
        laws = torch.stack([expert(x[:, -self.last :]) for expert in self.experts], 1)
        return (weights[..., None] * laws).sum(1)


def vibration_autoencoder(width: int = 8) -> nn.Module:
    """Strided convolutions to a sixth of the numbers and back."""
    return nn.Sequential(
        *(nn.Conv1d(1, width, 8, 4, 2), nn.Tanh(), nn.Conv1d(width, 2 * width, 8, 4, 2), nn.Tanh()),
        *(nn.Conv1d(2 * width, 5, 1), nn.Conv1d(5, 2 * width, 1), nn.Tanh()),
        *(nn.ConvTranspose1d(2 * width, width, 8, 4, 2), nn.Tanh()),
        nn.ConvTranspose1d(width, 1, 8, 4, 2),
    )
