"""Networks for images ``[N, C, H, W]``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.residual import Residual
from benchmarks.diagnosis.draws import pixels


class Ghost(nn.Module):
    """Half of the channels are computed of the other half, one by one (Han et al., 2020)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        half = outside // 2
        self.primary = nn.Sequential(
            nn.Conv2d(inside, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU()
        )
        self.cheap = nn.Sequential(
            nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False),
            *(nn.BatchNorm2d(half), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        primary = self.primary(x)
        return torch.cat([primary, self.cheap(primary)], 1)


def ghost_net(width: int = 16, classes: int = 6) -> nn.Module:
    """Han et al., 2020, with two bottlenecks."""

    def bottleneck(width: int) -> nn.Module:
        shrink = nn.Conv2d(2 * width, width, 1, bias=False)
        return Residual(Ghost(width, 2 * width), shrink, nn.BatchNorm2d(width))

    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1, bias=False),
        *(nn.BatchNorm2d(width), nn.ReLU(), bottleneck(width)),
        nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False),
        *(nn.BatchNorm2d(2 * width), nn.ReLU(), bottleneck(2 * width)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes)),
    )


def conv_mixer(width: int = 24, depth: int = 3, classes: int = 5) -> nn.Module:
    """Trockman and Kolter, 2022: patches, then convolutions over places and over channels."""

    def layer(width: int) -> nn.Module:
        return nn.Sequential(
            Residual(
                nn.Conv2d(width, width, 5, padding=2, groups=width),
                *(nn.GELU(), nn.BatchNorm2d(width)),
            ),
            *(nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width)),
        )

    return nn.Sequential(
        *(nn.Conv2d(1, width, 2, 2), nn.GELU(), nn.BatchNorm2d(width)),
        *(layer(width) for _ in range(depth)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)),
    )


class LinkNet(nn.Module):
    """What is seen on the way down is added on the way up (Chaurasia and Culurciello, 2017)."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = self._layer(nn.Conv2d(1, width, 3, padding=1, bias=False))
        self.second = self._layer(nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False))
        self.third = self._layer(nn.Conv2d(2 * width, 3 * width, 3, 2, 1, bias=False))
        self.up_third = self._layer(nn.ConvTranspose2d(3 * width, 2 * width, 2, 2, bias=False))
        self.up_second = self._layer(nn.ConvTranspose2d(2 * width, width, 2, 2, bias=False))
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    @staticmethod
    def _layer(convolution: nn.Conv2d | nn.ConvTranspose2d) -> nn.Module:
        return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        up = self.up_third(self.third(second)) + second
        return self.head(self.up_second(up) + first)


class ExpectedPlaces(nn.Module):
    """Mean rows and columns ``[N, K, 2]`` by maps' softmax (Nibali et al., 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.stack(pixels(x.shape[-1]), 2).flatten(0, 1)
        return x.flatten(2).softmax(2) @ places.to(x.dtype)


def locator(width: int = 16, places: int = 2) -> nn.Module:
    """Places of points as means over maps."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 5, padding=2), nn.GroupNorm(4, width), nn.LeakyReLU(0.1)),
        *(nn.Conv2d(width, width, 5, padding=2), nn.GroupNorm(4, width), nn.LeakyReLU(0.1)),
        *(nn.Conv2d(width, places, 3, padding=1), ExpectedPlaces()),
    )


def squashed(vectors: Tensor) -> Tensor:
    """Vectors whose length is below 1 (Sabour et al., 2017, eq. 1)."""
    squared = vectors.square().sum(-1, keepdim=True)
    return vectors * squared / (1 + squared) / (squared + 1e-6).sqrt()


class Capsules(nn.Module):
    """Sabour et al., 2017: capsules vote for classes, and agreement decides whose votes count.

    The outputs are the lengths of the classes' capsules.
    """

    def __init__(self, width: int = 24, size: int = 6, classes: int = 6) -> None:
        super().__init__()
        self.size, self.rounds = size, 2
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 5, 2, 2), nn.ReLU(), nn.Conv2d(width, 5 * size, 5, 2)),
        )
        self.votes = nn.Parameter(0.3 * torch.randn(20, classes, size, size))

    def forward(self, x: Tensor) -> Tensor:
        maps = self.features(x)
        low = squashed(maps.unflatten(1, (-1, self.size)).permute(0, 1, 3, 4, 2).flatten(1, 3))
        votes = torch.einsum("nis,icst->nict", low, self.votes)
        agreement = torch.zeros_like(votes[..., 0])
        for _ in range(self.rounds):
            shares = agreement.softmax(2)[..., None]
            high = squashed((shares * votes).sum(1))
            agreement = agreement + (votes * high[:, None]).sum(3).detach()
        return (high.square().sum(2) + 1e-6).sqrt()


class TripletNetwork(nn.Module):
    """The same layers for each image ``[N, 3, 1, H, W]`` (Schroff et al., 2015)."""

    def __init__(self, width: int = 12, size: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * width, size)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(x.flatten(0, 1)), dim=1).unflatten(0, (-1, 3))


def noise_finder(width: int = 16, depth: int = 3) -> nn.Module:
    """Convolutions that give the noise of an image (Zhang et al., 2017)."""
    layers = [
        layer
        for _ in range(depth)
        for layer in (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
        )
    ]
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), *layers),
        nn.Conv2d(width, 1, 3, padding=1),
    )


def patch_discriminator(width: int = 12) -> nn.Module:
    """A score for each of many patches (Isola et al., 2017)."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.InstanceNorm2d(2 * width), nn.LeakyReLU(0.2)),
        nn.Conv2d(2 * width, 1, 3, padding=1),
    )
