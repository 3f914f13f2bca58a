"""Networks for sounds and time series."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.residual import Residual


class Recogniser(nn.Module):
    """A convolution in time and two recurrent directions (Amodei et al., 2016)."""

    def __init__(self, bands: int = 12, width: int = 24, classes: int = 6) -> None:
        super().__init__()
        self.frames = nn.Sequential(
            *(nn.Conv1d(bands, width, 5, 2, 2), nn.BatchNorm1d(width), nn.Hardtanh(0, 20))
        )
        self.recurrent = nn.GRU(width, 20, batch_first=True, bidirectional=True)
        self.head = nn.Linear(40, classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.recurrent(self.frames(x).transpose(1, 2))
        return self.head(outputs).transpose(1, 2)


class ForecastBlock(nn.Module):
    """Explains a part of the past and forecasts what follows from it."""

    def __init__(self, past: int, future: int, width: int) -> None:
        super().__init__()
        self.past = past
        self.layers = nn.Sequential(
            *(nn.Linear(past, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, past + future),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        explained, forecast = self.layers(x).tensor_split([self.past], 1)
        return x - explained, forecast


class NBeats(nn.Module):
    """Each block sees what those before it haven't explained (Oreshkin et al., 2020)."""

    def __init__(self, past: int = 36, future: int = 6, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ForecastBlock(past, future, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        forecasts = []
        for block in self.blocks:
            x, forecast = block(x)
            forecasts.append(forecast)
        return torch.stack(forecasts).sum(0)


class CountForecaster(nn.Module):
    """What is to come at each time, as a mean and a dispersion (Salinas et al., 2020)."""

    def __init__(self, inputs: int = 8, width: int = 32) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(inputs, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.recurrent(x)
        return self.head(outputs)


class StateSpace(nn.Module):
    """A linear system with diagonal transitions for each channel (Gu et al., 2022, S4D).

    It is computed as a convolution with the system's response, by Fourier transforms.
    """

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        self.step = nn.Parameter(math.log(0.01) + math.log(10) * torch.rand(width, 1))
        self.decay = nn.Parameter(torch.full((width, states), math.log(0.5)))
        frequencies = math.pi * torch.arange(1.0, states + 1)
        self.frequency = nn.Parameter(frequencies.repeat(width, 1))
        self.output = nn.Parameter(torch.randn(2, width, states) / math.sqrt(states))
        self.skip = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        length = x.shape[1]
        response = torch.fft.rfft(self._response(length), 2 * length)
        signal = torch.fft.rfft(x.float().transpose(1, 2), 2 * length)
        mixed = torch.fft.irfft(signal * response, 2 * length)[..., :length]
        return mixed.transpose(1, 2) + x * self.skip

    def _response(self, length: int) -> Tensor:
        """What an impulse causes at each time, ``[D, T]``."""
        step = self.step.exp()
        time = torch.arange(length)
        size = (-(step * self.decay.exp())[..., None] * time).exp() * step[..., None]
        angle = (step * self.frequency)[..., None] * time
        waves = self.output[0][..., None] * angle.cos() - self.output[1][..., None] * angle.sin()
        return 2 * (size * waves).sum(1)


class StateSpaceClassifier(nn.Module):
    """Blocks of state spaces that normalise first, and a mean over time."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.blocks = nn.Sequential(*(self._block(width) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    @staticmethod
    def _block(width: int) -> nn.Module:
        return Residual(
            *(nn.LayerNorm(width), StateSpace(width), nn.GELU()),
            *(nn.Linear(width, 2 * width), nn.GLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)).mean(1))


class WaveUNet(nn.Module):
    """Down and up along the time, with what was seen at each length (Stoller et al., 2018)."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        widths = (1, width, 2 * width, 3 * width)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv1d(inside, outside, 8, 2, 3), nn.PReLU(outside))
            for inside, outside in pairwise(widths)
        )
        self.middle = nn.Sequential(
            nn.Conv1d(3 * width, 3 * width, 3, padding=1), nn.PReLU(3 * width)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose1d(2 * outside, inside if inside > 1 else width, 8, 2, 3)
            for inside, outside in zip(widths[2::-1], widths[:0:-1], strict=True)
        )
        self.activations = nn.ModuleList(nn.PReLU() for _ in self.up)
        self.head = nn.Conv1d(1 + width, 1, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        seen, signal = [], x
        for layer in self.down:
            x = layer(x)
            seen.append(x)
        x = self.middle(x)
        for layer, activation, skipped in zip(self.up, self.activations, seen[::-1], strict=True):
            x = activation(layer(torch.cat([x, skipped], 1)))
        return self.head(torch.cat([x, signal], 1))
