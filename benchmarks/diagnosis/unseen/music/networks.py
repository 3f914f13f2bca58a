"""Networks for music."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere


class PitchConvolution(nn.Module):
    """Each pitch sees all others by their distance on the circle of pitches."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inside, outside, (12, 3), padding=(0, 1), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(torch.cat([x, x[:, :, :11]], 2))


class ChordNetwork(nn.Module):
    """The same numbers for each root, so that a transposed chord has transposed outputs."""

    def __init__(self, width: int = 12, kinds: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(PitchConvolution(1, width), nn.BatchNorm2d(width), nn.ReLU()),
            *(PitchConvolution(width, width), nn.BatchNorm2d(width), nn.ReLU()),
        )
        self.head = nn.Linear(width, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(3).transpose(1, 2)).flatten(1)


class Autocorrelation(nn.Module):
    """How alike a series ``[N, T]`` is to itself some steps later, for each delay."""

    def __init__(self, delays: int) -> None:
        super().__init__()
        self.delays = delays

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        spectrum = torch.fft.rfft(x, 2 * length).abs().square()
        return torch.fft.irfft(spectrum, 2 * length)[:, 1 : self.delays + 1] / length


def tempo_network(delays: int = 48, width: int = 64) -> nn.Module:
    """Layers over the autocorrelation."""
    return nn.Sequential(
        *(Autocorrelation(delays), nn.LayerNorm(delays), nn.Linear(delays, width), nn.GELU()),
        *(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)),
    )


class Transcriber(nn.Module):
    """Onsets by convolutions over time, and notes by a memory that sees them."""

    def __init__(self, bins: int = 36, width: int = 32, size: int = 16, pitches: int = 12) -> None:
        super().__init__()
        self.acoustics = nn.Sequential(
            *(nn.Conv1d(bins, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU()),
        )
        self.memory = nn.GRU(width, size, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * size + width, pitches)

    def forward(self, x: Tensor) -> Tensor:
        heard = self.acoustics(x.transpose(1, 2)).transpose(1, 2)
        return self.head(torch.cat([heard, self.memory(heard)[0]], 2))


class Drummer(nn.Module):
    """A memory of what was hit, and layers for the next step."""

    def __init__(self, drums: int = 4, size: int = 48) -> None:
        super().__init__()
        self.memory = nn.LSTM(drums, size, batch_first=True)
        self.head = nn.Sequential(
            *(nn.LayerNorm(size), nn.Linear(size, size), nn.Tanh(), nn.Linear(size, drums))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x)[0])


class TimbreAndRhythm(nn.Module):
    """Tall filters for timbre beside wide ones for rhythm (Pons et al., 2018)."""

    def __init__(self, width: int = 12, bands: int = 24, tags: int = 5) -> None:
        super().__init__()
        self.tall = nn.Sequential(
            *(nn.Conv2d(1, width, (bands // 2, 3), (2, 1), (0, 1)), nn.GroupNorm(3, width)),
            *(nn.SiLU(), nn.MaxPool2d((7, 1))),
        )
        self.wide = nn.Sequential(
            *(nn.AvgPool2d((6, 1)), nn.Conv2d(1, width, (1, 11), padding=(0, 5))),
            *(nn.GroupNorm(3, width), nn.SiLU(), nn.MaxPool2d((4, 1))),
        )
        self.over_time = nn.Sequential(
            *(nn.Conv1d(2 * width, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.SiLU())
        )
        self.head = nn.Sequential(nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, tags))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.over_time(torch.cat([self.tall(x), self.wide(x)], 1)[:, :, 0])
        return self.head(torch.cat([seen.mean(2), seen.amax(2)], 1))


class SynthesiserMixture(nn.Module):
    """Hidden layers of several synthesisers, mixed before the last layer."""

    def __init__(self, knobs: int = 6, width: int = 24, experts: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(knobs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(knobs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            for _ in range(experts)
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.gate(x), 1)
        hidden = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head((weights[..., None] * hidden).sum(1))
