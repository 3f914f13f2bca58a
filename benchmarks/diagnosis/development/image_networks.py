"""Networks of the development problems that are for images."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere


class Residual(nn.Module):
    """Adds a network's outputs to its inputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Transposed(nn.Module):
    """Exchanges the axes 1 and 2."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class UNet(nn.Module):
    """Ronneberger et al., 2015, with batch normalisation and two scales; gives a class a pixel."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.fine = self._twice(1, width)
        self.middle = self._twice(width, 2 * width)
        self.coarse = self._twice(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.to_middle = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.from_middle = self._twice(4 * width, 2 * width)
        self.to_fine = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.from_fine = self._twice(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _twice(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()),
            *(nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        middle = self.middle(self.pool(fine))
        up = self.to_middle(self.coarse(self.pool(middle)))
        up = self.to_fine(self.from_middle(torch.cat([middle, up], 1)))
        return self.head(self.from_fine(torch.cat([fine, up], 1)))


class VisionTransformer(nn.Module):
    """Dosovitskiy et al., 2021: patches, a class token and layers that normalise first."""

    def __init__(self, side: int = 16, patch: int = 4, width: int = 32, classes: int = 8) -> None:
        super().__init__()
        tokens = 1 + (side // patch) ** 2
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        layer = nn.TransformerEncoderLayer(
            *(width, 4, 2 * width, 0.1), activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1)
        return self.head(self.encoder(tokens + self.position)[:, 0])


def inverted(inside: int, outside: int, stride: int) -> nn.Module:
    """An inverted residual block of MobileNetV2: expands, filters each channel, and projects."""
    inner = 2 * inside
    layers = (
        *(nn.Conv2d(inside, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
        nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
        *(nn.BatchNorm2d(inner), nn.ReLU6()),
        *(nn.Conv2d(inner, outside, 1, bias=False), nn.BatchNorm2d(outside)),
    )
    return Residual(*layers) if inside == outside and stride == 1 else nn.Sequential(*layers)


def mobile_net(classes: int = 4) -> nn.Module:
    """Sandler et al., 2018, for images ``[3, 16, 16]``."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        *(inverted(8, 12, 1), inverted(12, 12, 1), inverted(12, 20, 2), inverted(20, 20, 1)),
        *(nn.Conv2d(20, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU6()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(48, classes)),
    )


class DenseLayer(nn.Module):
    """Appends new channels to those that it is given."""

    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.BatchNorm2d(inside), nn.ReLU()),
            nn.Conv2d(inside, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.inner(x)], 1)


def dense_net(growth: int = 6, classes: int = 2) -> nn.Module:
    """Huang et al., 2017, with two blocks of three layers, for images ``[3, 12, 12]``."""
    first, second = 2 * growth, 5 * growth // 2
    return nn.Sequential(
        nn.Conv2d(3, first, 3, padding=1, bias=False),
        *(DenseLayer(first + k * growth, growth) for k in range(3)),
        *(nn.BatchNorm2d(5 * growth), nn.ReLU(), nn.Conv2d(5 * growth, second, 1, bias=False)),
        nn.AvgPool2d(2),
        *(DenseLayer(second + k * growth, growth) for k in range(3)),
        *(nn.BatchNorm2d(second + 3 * growth), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(second + 3 * growth, classes),
    )


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of images ``[N, C, H, W]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scaled(nn.Module):
    """Multiplies each channel by a weight that starts at a small value."""

    def __init__(self, width: int, start: float = 0.1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width, 1, 1), start))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def conv_next(width: int = 16, classes: int = 10) -> nn.Module:
    """Liu et al., 2022, for images ``[1, 16, 16]``."""

    def block(width: int) -> nn.Module:
        return Residual(
            *(nn.Conv2d(width, width, 5, padding=2, groups=width), ChannelNorm(width)),
            *(nn.Conv2d(width, 3 * width, 1), nn.GELU(), nn.Conv2d(3 * width, width, 1)),
            Scaled(width),
        )

    return nn.Sequential(
        *(nn.Conv2d(1, width, 2, stride=2), ChannelNorm(width), block(width), block(width)),
        *(ChannelNorm(width), nn.Conv2d(width, 2 * width, 2, stride=2), block(2 * width)),
        *(nn.Flatten(), nn.LayerNorm(32 * width), nn.Linear(32 * width, classes)),
    )


class Siamese(nn.Module):
    """Embeds two images by the same layers and compares them (Koch et al., 2015)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, width), nn.Sigmoid()),
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.embed(x.flatten(0, 1)).view(len(x), 2, -1).unbind(1)
        return self.head((first - second).abs())


class VariationalAutoencoder(nn.Module):
    """Kingma and Welling, 2014, with convolutions, for images ``[1, 16, 16]``.

    The outputs are, one behind the other, the logits of the pixels and the codes' means and
    logarithmic variances.
    """

    def __init__(self, width: int = 12, codes: int = 6) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            *(nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Flatten(), nn.Linear(32 * width, 2 * codes)),
        )
        self.decode = nn.Sequential(
            *(nn.Linear(codes, 32 * width), nn.LeakyReLU(0.2), nn.Unflatten(1, (2 * width, 4, 4))),
            *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Flatten()),
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.encode(x).chunk(2, 1)
        codes = mean + (variance / 2).exp() * torch.randn_like(mean)
        return torch.cat([self.decode(codes), mean, variance], 1)


def evidence_bound(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """The negative evidence lower bound of each image, as the autoencoder's outputs give it."""
    logits, mean, variance = outputs.tensor_split(
        (targets[0].numel(), (targets[0].numel() + outputs.shape[1]) // 2), 1
    )
    pixels = F.binary_cross_entropy_with_logits(logits, targets.flatten(1), reduction="none")
    divergence = (mean**2 + variance.exp() - 1 - variance) / 2
    losses = pixels.sum(1) + divergence.sum(1)
    return losses.mean() if reduction == "mean" else losses.sum()


def mixer(side: int = 12, frames: int = 4, patch: int = 3, width: int = 32) -> nn.Module:
    """MLP-Mixer (Tolstikhin et al., 2021) for nine classes of images ``[frames, side, side]``."""
    tokens = (side // patch) ** 2

    def mix(size: int, inner: int) -> tuple[nn.Module, ...]:
        return nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size)

    def block() -> nn.Module:
        return nn.Sequential(
            Residual(nn.LayerNorm(width), Transposed(), *mix(tokens, 2 * tokens), Transposed()),
            Residual(nn.LayerNorm(width), *mix(width, 2 * width)),
        )

    return nn.Sequential(
        *(nn.Conv2d(frames, width, patch, patch), nn.Flatten(2), Transposed(), block(), block()),
        *(nn.LayerNorm(width), nn.Flatten(), nn.Linear(tokens * width, 9)),
    )


class ConvolutionMixture(nn.Module):
    """Convolutional experts for the whole image, weighted by a gate on small copies of it."""

    def __init__(self, experts: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.shrink = nn.Sequential(nn.AvgPool2d(4), nn.Flatten())
        self.gate = nn.Linear(25, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(1, 8, 5, 2, 2), nn.PReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.PReLU()),
                *(nn.Flatten(), nn.Linear(300, classes)),
            )
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(self.shrink(x)).softmax(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 2)
        return (outputs * weights[:, None, :]).sum(2)


class Sine(nn.Module):
    """Sines of multiples of the inputs."""

    def __init__(self, frequency: float) -> None:
        super().__init__()
        self.frequency = frequency

    def forward(self, x: Tensor) -> Tensor:
        return (self.frequency * x).sin()


def siren(width: int = 48, frequency: float = 15.0) -> nn.Module:
    """Sitzmann et al., 2020, with their initial weights: from places ``[2]`` to colours ``[3]``."""

    def linear(inside: int, outside: int, bound: float) -> nn.Linear:
        layer = nn.Linear(inside, outside)
        nn.init.uniform_(layer.weight, -bound, bound)
        return layer

    bound = math.sqrt(6 / width) / frequency
    return nn.Sequential(
        *(linear(2, width, 1 / 2), Sine(frequency), linear(width, width, bound), Sine(frequency)),
        *(linear(width, width, bound), Sine(frequency), linear(width, 3, bound)),
    )
