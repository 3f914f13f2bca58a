"""Problems for the oceans.

Functions of data draw ``n`` samples with torch's global random numbers. Losses have the reductions
of PyTorch's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import SGD, Adam, AdamW

from benchmarks.diagnosis.development.networks import Apply
from benchmarks.diagnosis.draws import Samples, noisy, pixels, uniform
from benchmarks.diagnosis.problem import reduced
from benchmarks.diagnosis.schedules import cosine, exponential, polynomial
from benchmarks.diagnosis.training import Training, trained


def turned(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """One less the cosine of the angle to the true direction."""
    return reduced(1 - F.cosine_similarity(outputs, targets, 1), reduction)


def laplace_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Of medians and the logarithms of their scales, up to a constant."""
    median, scale = outputs.chunk(2, 1)
    losses = (targets - median).abs() * (-scale).exp() + scale
    return reduced(losses.sum(1), reduction)


def eddies(n: int, side: int = 16) -> Samples:
    """Currents ``[2, side, side]``; where water turns left, right or not, ``[side, side]``."""
    rows, columns = pixels(side)
    current = torch.zeros(n, 2, side, side)
    kind = torch.zeros(n, side, side, dtype=torch.long)
    for sign, label in ((1.0, 1), (-1.0, 2)):
        row, column = uniform(-0.7, 0.7, n, 1, 1), uniform(-0.7, 0.7, n, 1, 1)
        size = uniform(0.2, 0.4, n, 1, 1)
        south, east = rows - row, columns - column
        away = (south.square() + east.square()) / size.square()
        turning = 2 * sign * (-away / 2).exp() / size
        current = current + torch.stack([-turning * south, turning * east], 1)
        kind[away < 1.5] = label
    steady = 0.3 * torch.randn(n, 2, 1, 1)
    return noisy(current + steady, 0.1) / 0.5, kind


def buoys(n: int, length: int = 64) -> Samples:
    """How a buoy rises and tilts, ``[3, length]``; sine and cosine of where waves go, ``[2]``.

    A second, weaker swell comes from elsewhere.
    """
    time = torch.arange(length)
    moved = torch.zeros(n, 3, length)
    main = uniform(-math.pi, math.pi, n, 1)
    for strength, direction in ((1.0, main), (0.35, uniform(-math.pi, math.pi, n, 1))):
        period = uniform(6, 16, n, 1)
        phase = 2 * math.pi * (time / period + torch.rand(n, 1))
        tilts = [direction.sin() * phase.cos(), direction.cos() * phase.cos()]
        moved = moved + strength * torch.stack([phase.sin(), *tilts], 1)
    return noisy(moved, 0.2) / 0.65, torch.cat([main.sin(), main.cos()], 1)


def layers(n: int, depths: int = 40) -> Samples:
    """Temperature and salt by depth, ``[2, depths]``; how deep water is mixed, ``[1]``."""
    depth = torch.linspace(0, 1, depths)
    mixed, sharp = uniform(0.15, 0.75, n, 1), uniform(0.02, 0.08, n, 1)
    below = ((depth - mixed) / sharp).sigmoid()
    warm, salt = uniform(0.7, 1.5, n, 1), uniform(-0.8, 0.8, n, 1)
    temperature = -warm * below - 0.3 * depth + uniform(-0.3, 0.3, n, 1)
    salinity = salt * below + uniform(-0.3, 0.3, n, 1)
    profile = torch.stack([(temperature + 0.65) / 0.6, salinity / 0.4], 1)
    return noisy(profile, 0.15), (mixed - 0.45) / 0.173


def plankton(n: int, side: int = 16) -> Samples:
    """Pictures ``[1, side, side]`` of rings, chains, rods, stars and blobs; which of them it is."""
    rows, columns = pixels(side)
    kind = torch.randint(5, (n,))
    row, column = uniform(-0.25, 0.25, n, 1, 1), uniform(-0.25, 0.25, n, 1, 1)
    angle, size = uniform(0, math.pi, n, 1, 1), uniform(0.45, 0.65, n, 1, 1)
    south, east = rows - row, columns - column
    along = angle.cos() * south + angle.sin() * east
    across = angle.cos() * east - angle.sin() * south
    radius = (along.square() + across.square()).sqrt()
    around = torch.atan2(across, along)
    inside = (along.abs() < 1.3 * size) * 1.0
    line = (-0.5 * (across / 0.1).square()).exp() * inside
    pictures = torch.stack(
        [
            (-0.5 * ((radius - size) / 0.1).square()).exp(),
            (-0.5 * (across / 0.17).square()).exp() * inside * (along * 9).sin().square(),
            line,
            (-0.5 * (radius * (2 * around).sin() / 0.1).square()).exp() * (radius < 1.2 * size),
            (-0.5 * (radius / (0.6 * size)).square()).exp(),
        ],
        1,
    )
    seen = pictures[torch.arange(n), kind] * uniform(0.7, 1.3, n, 1, 1)
    return noisy((seen - 0.15) / 0.3, 0.4)[:, None], kind


def floats(n: int, length: int = 24, later: int = 6) -> Samples:
    """Where a float drifts, ``[length, 2]``, from its last place; where it is later, ``[2]``.

    It follows a steady current and turns with an eddy.
    """
    time = torch.arange(-length + 1, later + 1)
    speed, heading = uniform(0.02, 0.08, n, 1), uniform(0, 2 * math.pi, n, 1)
    turn, start = uniform(-0.35, 0.35, n, 1), uniform(0, 2 * math.pi, n, 1)
    radius = uniform(0.2, 0.6, n, 1)
    phase = start + turn * time
    east = speed * heading.cos() * time + radius * (phase.cos() - start.cos())
    north = speed * heading.sin() * time + radius * (phase.sin() - start.sin())
    path = torch.stack([east, north], 2)
    return noisy(path[:, :length], 0.02) / 0.7, path[:, -1] / 0.5


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


def spread(x: Tensor) -> Tensor:
    """Means and standard deviations over time of ``[N, C, T]``."""
    average = x.mean(2)
    return torch.cat([average, ((x - average[..., None]).square().mean(2) + 1e-5).sqrt()], 1)


def buoy_network(width: int = 24) -> nn.Module:
    """Convolutions, what is spread over time, and layers (Snyder et al., 2018)."""
    return nn.Sequential(
        *(nn.Conv1d(3, width, 5), nn.GroupNorm(4, width), nn.SiLU()),
        *(nn.Conv1d(width, width, 5, dilation=2), nn.GroupNorm(4, width), nn.SiLU()),
        *(Apply(spread), nn.Linear(2 * width, 48), nn.SiLU(), nn.Linear(48, 2)),
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


# fmt: off
OCEANS: tuple[Training, ...] = (
    trained("eddies", EddyNetwork, eddies, 1600, F.cross_entropy,
        SGD, 0.05, 16, 120, polynomial, momentum=0.9, weight_decay=1e-4),
    trained("buoys", buoy_network, buoys, 5000, turned,
        AdamW, 4e-3, 64, 160, cosine, weight_decay=0.01),
    trained("mixed layers", layer_network, layers, 5000, F.huber_loss,
        Adam, 3e-3, 64, 150),
    trained("plankton", plankton_network, plankton, 4000, F.cross_entropy,
        AdamW, 3e-3, 32, 150, cosine, weight_decay=0.01),
    trained("floats", FloatNetwork, floats, 5000, laplace_likelihood,
        Adam, 3e-3, 64, 160, exponential, clip=1.0),
)
