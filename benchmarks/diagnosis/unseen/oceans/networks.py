"""Networks for the oceans."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class EddyNetwork(nn.Module):
    """A coarse view that is enlarged beside a fine one (Yu et al., 2018)."""

    def __init__(self, width: int = 12, classes: int = 3) -> None:
        super().__init__()
        self.fine = nn.Sequential(*self._layer(2, width, 1), *self._layer(width, width, 1))
        self.coarse = nn.Sequential(
            *(*self._layer(2, width, 2), *self._layer(width, 2 * width, 2)),
            *(*self._layer(2 * width, width, 1), nn.Upsample(scale_factor=4, mode="bilinear")),
        )
        self.head = nn.Sequential(
            *(*self._layer(2 * width, width, 1), nn.Conv2d(width, classes, 1))
        )

    @staticmethod
    def _layer(inside: int, outside: int, stride: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        return (convolution, nn.BatchNorm2d(outside), nn.LeakyReLU(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.fine(x), self.coarse(x)], 1))


class Spread(nn.Module):
    """Means and standard deviations over time of ``[N, C, T]``."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(2)
        return torch.cat([mean, ((x - mean[..., None]).square().mean(2) + 1e-5).sqrt()], 1)


def buoy_network(width: int = 24) -> nn.Module:
    """Convolutions, what is spread over time, and layers (Snyder et al., 2018)."""
    return nn.Sequential(
        *(nn.Conv1d(3, width, 5), nn.GroupNorm(4, width), nn.SiLU()),
        *(nn.Conv1d(width, width, 5, dilation=2), nn.GroupNorm(4, width), nn.SiLU()),
        *(Spread(), nn.Linear(2 * width, 48), nn.SiLU(), nn.Linear(48, 2)),
    )


def layer_network(depths: int = 40, width: int = 8) -> nn.Module:
    """Convolutions along the depth with averages between, as in LeNet."""
    return nn.Sequential(
        *(nn.Conv1d(2, width, 5, padding=2), nn.Tanh(), nn.AvgPool1d(2)),
        *(nn.Conv1d(width, 2 * width, 5, padding=2), nn.Tanh(), nn.AvgPool1d(2)),
        *(nn.Flatten(), nn.Linear(depths * width // 2, 32), nn.Tanh(), nn.Linear(32, 1)),
    )


class ChannelAttention(nn.Module):
    """Weights of channels by those beside them (Wang et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weigh(x.mean((2, 3))[:, None])[:, 0]
        return x * weights[..., None, None]


def plankton_network(width: int = 12, classes: int = 5) -> nn.Module:
    """Convolutions with such weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
        *(ChannelAttention(), nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1)),
        *(nn.BatchNorm2d(2 * width), nn.ReLU(), ChannelAttention(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 2 * width, 3), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * width, classes)),
    )


class FloatNetwork(nn.Module):
    """Two layers of memory; medians and scales."""

    def __init__(self, size: int = 32, outputs: int = 4) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, size), nn.GELU())
        self.memory = nn.LSTM(size, size, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, outputs))

    def forward(self, x: Tensor) -> Tensor:
        moved = torch.diff(x, dim=1, prepend=x[:, :1])
        return self.head(self.memory(self.embed(torch.cat([x, 10 * moved], 2)))[0][:, -1])
