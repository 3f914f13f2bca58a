"""Networks for images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import Attention, SelfAttention
from benchmarks.diagnosis.development.residual import Residual


class Excitation(nn.Module):
    """Multiplies each channel by a number that depends on all of them (Hu et al., 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.excite = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, width // 2), nn.SiLU()),
            *(nn.Linear(width // 2, width), nn.Sigmoid()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.excite(x)[..., None, None]


def excited_resnet(width: int = 12, classes: int = 5) -> nn.Module:
    """Residual blocks that normalise first, with excitation, for images ``[3, 16, 16]``."""

    def block(width: int) -> nn.Module:
        return Residual(
            *(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)),
            *(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)),
            Excitation(width),
        )

    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, 2, 1), block(width), nn.Conv2d(width, 2 * width, 3, 2, 1)),
        *(block(2 * width), nn.GroupNorm(4, 2 * width), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes)),
    )


class ShuffleUnit(nn.Module):
    """Half of the channels pass three convolutions, and all are interleaved (Ma et al., 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            *(nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU()),
            *(nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False), nn.BatchNorm2d(half)),
            *(nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU()),
        )
        self.shuffle = nn.ChannelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        return self.shuffle(torch.cat([kept, self.branch(changed)], 1))


def shuffle_net(width: int = 16, classes: int = 7) -> nn.Module:
    """Ma et al., 2018, for images ``[1, 12, 12]``."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(ShuffleUnit(width), nn.MaxPool2d(2), ShuffleUnit(width), ShuffleUnit(width)),
        *(nn.Conv2d(width, 2 * width, 3, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes)),
    )


class Inception(nn.Module):
    """Convolutions of several sizes and pooling side by side (Szegedy et al., 2015)."""

    def __init__(self, inside: int, each: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inside, each, size, padding=size // 2), nn.LeakyReLU(0.05))
            for size in (1, 3, 5)
        )
        self.pooled = nn.Sequential(
            *(nn.MaxPool2d(3, 1, 1), nn.Conv2d(inside, each, 1), nn.LeakyReLU(0.05))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*(branch(x) for branch in self.branches), self.pooled(x)], 1)


def counter(each: int = 4) -> nn.Module:
    """A number for an image ``[1, 16, 16]``, from two inception blocks."""
    return nn.Sequential(
        *(Inception(1, each), nn.AvgPool2d(2), Inception(4 * each, each)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * each, 1)),
    )


def dilated_network(width: int = 12) -> nn.Module:
    """A logit for each pixel, from convolutions of growing dilation (Yu and Koltun, 2016)."""

    def layer(inside: int, dilation: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(inside, width, 3, padding=dilation, dilation=dilation)
        return convolution, nn.GroupNorm(3, width), nn.LeakyReLU(0.1)

    return nn.Sequential(
        *(*layer(1, 1), *layer(width, 2), *layer(width, 4), *layer(width, 1)),
        nn.Conv2d(width, 1, 1),
    )


def upscaler(width: int = 16) -> nn.Module:
    """Twice the resolution, by convolutions at the lower one (Shi et al., 2016)."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 5, padding=2), nn.PReLU(width)),
        *(nn.Conv2d(width, width, 3, padding=1), nn.PReLU(width)),
        *(nn.Conv2d(width, 4, 3, padding=1), nn.PixelShuffle(2)),
    )


class Perceiver(nn.Module):
    """A few learnt vectors attend to the patches of an image (Jaegle et al., 2021)."""

    def __init__(self, width: int = 32, latents: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(1, width, 4, 4), nn.Flatten(2))
        self.position = nn.Parameter(0.1 * torch.randn(16, width))
        self.latents = nn.Parameter(0.1 * torch.randn(latents, width))
        self.norm = nn.RMSNorm(width)
        self.read = nn.ModuleList(Attention(width, 2) for _ in range(2))
        self.think = nn.ModuleList(
            nn.Sequential(
                Residual(nn.RMSNorm(width), SelfAttention(width, 2)),
                Residual(
                    *(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.GELU()),
                    nn.Linear(2 * width, width),
                ),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.patches(x).transpose(1, 2) + self.position)
        latents = self.latents.expand(len(x), -1, -1)
        for read, think in zip(self.read, self.think, strict=True):
            latents = think(latents + read(latents, tokens))
        return self.head(latents.mean(1))


class PairSum(nn.Module):
    """The same layers for both images ``[2, 1, 8, 8]``; a class from the sum of their outputs."""

    def __init__(self, width: int = 48, classes: int = 19) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            *(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.CELU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(12, 24, 2), nn.BatchNorm2d(24), nn.CELU(), nn.Flatten()),
            nn.Linear(96, width),
        )
        self.head = nn.Sequential(
            *(nn.LayerNorm(width), nn.CELU(), nn.Linear(width, width), nn.CELU()),
            nn.Linear(width, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x.flatten(0, 1)).unflatten(0, (len(x), 2)).sum(1))


class TwoViews(nn.Module):
    """Embeds both views ``[2, 1, 16, 16]`` of an image by the same layers: ``[N, 2, D]``."""

    def __init__(self, width: int = 16, outputs: int = 16) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            *(nn.Conv2d(1, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * width, 64), nn.BatchNorm1d(64), nn.ReLU()),
            nn.Linear(64, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x.flatten(0, 1)).unflatten(0, (len(x), 2))
