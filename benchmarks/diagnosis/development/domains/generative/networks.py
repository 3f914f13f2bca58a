"""Generative models and autoencoders."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.residual import Residual


class Coupling(nn.Module):
    """Scales and shifts one coordinate by what is computed of the other (Dinh et al., 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_and_shift = nn.Sequential(
            *(nn.Linear(1, width), nn.LeakyReLU(0.1), nn.Linear(width, width), nn.LeakyReLU(0.1)),
            nn.Linear(width, 2),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The new coordinates, in the other order, and the logarithmic determinant."""
        first, second = x.chunk(2, 1)
        scale, shift = self.scale_and_shift(first).chunk(2, 1)
        scale = 2 * (scale / 2).tanh()
        return torch.cat([second * scale.exp() + shift, first], 1), scale


class Flow(nn.Module):
    """Maps points to normal noise: ``[N, 3]``, with the logarithmic determinants as last column."""

    def __init__(self, width: int = 24, couplings: int = 6) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(width) for _ in range(couplings))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), 1)
        for coupling in self.couplings:
            x, determinant = coupling(x)
            total = total + determinant
        return torch.cat([x, total], 1)


class ModulatedBlock(nn.Module):
    """A residual block whose normalised inputs depend on a condition (Perez et al., 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate = nn.Linear(width, 2 * width)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulate(condition).chunk(2, 1)
        return x + self.layers(self.norm(x) * (1 + scale) + shift)


class Denoiser(nn.Module):
    """The noise in points, from them and its amount as waves (Ho et al., 2020)."""

    def __init__(self, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(2, width)
        self.condition = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(ModulatedBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        waves = math.pi * x[:, 2:] * torch.tensor([0.5, 1.0, 2.0, 4.0])
        condition = self.condition(torch.cat([waves.sin(), waves.cos()], 1))
        points = self.embed(x[:, :2])
        for block in self.blocks:
            points = block(points, condition)
        return self.head(points)


class MaskedConvolution(nn.Conv2d):
    """Depends on the pixels before each one, row by row, and on the pixel itself if ``own``."""

    seen: Tensor

    def __init__(self, inside: int, outside: int, size: int, own: bool) -> None:
        super().__init__(inside, outside, size, padding=size // 2)
        seen = torch.zeros(size * size)
        seen[: size * size // 2 + own] = 1
        self.register_buffer("seen", seen.view(size, size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.seen, self.bias, padding=self.padding)


def pixel_cnn(width: int = 16) -> nn.Module:
    """A logit for each pixel, from those before it (van den Oord et al., 2016)."""

    def block() -> nn.Module:
        return Residual(
            *(nn.ELU(), nn.Conv2d(width, width // 2, 1), nn.ELU()),
            *(MaskedConvolution(width // 2, width // 2, 3, True), nn.ELU()),
            nn.Conv2d(width // 2, width, 1),
        )

    return nn.Sequential(
        *(MaskedConvolution(1, width, 5, False), block(), block()),
        *(nn.ELU(), nn.Conv2d(width, 1, 1)),
    )


class SparseAutoencoder(nn.Module):
    """Reconstructions and, behind them, the codes they are made of (Cunningham et al., 2024)."""

    def __init__(self, inputs: int = 20, codes: int = 64) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(inputs, codes), nn.ReLU())
        self.decode = nn.Linear(codes, inputs)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.encode(x)
        return torch.cat([self.decode(codes), codes], 1)
