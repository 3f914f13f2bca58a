"""Convolutional networks and others of images, and some of sound and volumes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    affine_grid,
    conv2d,
    cross_entropy,
    grid_sample,
    relu,
    unfold,
)

from benchmarks.zoo.losses import CLASSES, classify, images
from benchmarks.zoo.network import Batch, Network, also_told

KIND = "by hand: images"
C = 4


class Pooled(nn.Module):
    """A body on images ``[N, 2, 8, 8]``, the mean over what is left of space, and a head."""

    def __init__(self, *body: nn.Module, width: int = C) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*body), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, ...]``."""
        return self.head(self.body(x).flatten(2).mean(2))


class Windows(nn.Module):
    """Attention inside of windows, which the second time are shifted (Swin)."""

    def __init__(self, side: int = 4) -> None:
        super().__init__()
        self.side = side
        self.inside = nn.Conv2d(2, C, 1)
        self.mix = nn.ModuleList(nn.Linear(C, 3 * C) for _ in range(2))
        self.bias = nn.Parameter(torch.randn((2 * side - 1) ** 2))
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        apart = places[:, None] - places + side - 1
        self.register_buffer("index", apart[..., 0] * (2 * side - 1) + apart[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 2, H, W]``."""
        hidden = self.inside(x).movedim(1, -1)
        n, size = len(hidden), hidden.shape[1]
        cells = size // self.side
        for mix, shift in zip(self.mix, (0, self.side // 2), strict=True):
            moved = hidden.roll((-shift, -shift), (1, 2)).view(
                n, cells, self.side, cells, self.side, C
            )
            folded = moved.transpose(2, 3).reshape(n * cells**2, self.side**2, C)
            query, key, value = mix(folded).chunk(3, -1)
            scores = query @ key.transpose(1, 2) + self.bias[self.index]
            out = (scores.softmax(-1) @ value).view(n, cells, cells, self.side, self.side, C)
            out = out.transpose(2, 3).reshape(hidden.shape)
            hidden = hidden + out.roll((shift, shift), (1, 2))
        return hidden.movedim(-1, 1)


class Patches(nn.Module):
    """Patches as tokens, a class token, position embeddings, one encoder layer (ViT)."""

    def __init__(self, side: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 8, side, side)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, (8 // side) ** 2 + 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 2, 8, 8]``."""
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.positions
        return self.head(self.layer(tokens)[:, 0])


class Modulated(nn.Module):
    """Each sample's own kernels, with samples folded into groups of one convolution (StyleGAN)."""

    def __init__(self) -> None:
        super().__init__()
        self.style, self.weight = nn.Linear(2, 2), nn.Parameter(torch.randn(C, 2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 2, H, W]``."""
        n, _, height, width = x.shape
        style = self.style(x.mean((2, 3))) + 1
        weight = self.weight * style[:, None, :, None, None]
        weight = weight / weight.square().sum((2, 3, 4), keepdim=True).add(1e-8).sqrt()
        folded = conv2d(x.reshape(1, -1, height, width), weight.flatten(0, 1), groups=n, padding=1)
        return folded.view(n, C, height, width)


class Standardised(nn.Conv2d):
    """A convolution whose kernels have mean zero and variance one."""

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, H, W]``."""
        mean, std = (
            self.weight.mean((1, 2, 3), keepdim=True),
            self.weight.std((1, 2, 3), keepdim=True),
        )
        return self._conv_forward(x, (self.weight - mean) / (std + 1e-5), self.bias)


class Aligned(nn.Module):
    """An image is moved to where a small network wants it (spatial transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.convolution = nn.Linear(128, 6), nn.Conv2d(2, C, 3)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 2, 8, 8]``."""
        where = 0.1 * self.where(x.flatten(1)).view(-1, 2, 3) + torch.eye(2, 3, dtype=x.dtype)
        grid = affine_grid(where, list(x.shape), align_corners=False)
        return self.convolution(grid_sample(x, grid, align_corners=False))


class Local(nn.Module):
    """Each place has its own kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(36, C, 18) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 2, 8, 8]``."""
        return torch.einsum("nip,poi->nop", unfold(x, 3), self.weight)


class Regions(nn.Module):
    """A head on regions cut out of images, of which each sample has another number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(2, C, 3, padding=1), nn.Linear(C * 9, CLASSES)

    def forward(self, x: Tensor, owner: Tensor, corners: Tensor) -> Tensor:
        """``[N, 2, H, W]``, whose image each of R regions is of, and where it starts."""
        hidden = relu(self.body(x))
        cut = [
            hidden[image, :, i : i + 3, j : j + 3]
            for image, (i, j) in zip(owner.tolist(), corners.tolist(), strict=True)
        ]
        return self.head(torch.stack(cut).flatten(1))


def regions_batch() -> Batch:
    """Images with one to three regions each, in any order."""
    counts = torch.randint(1, 4, (4,))
    owner = torch.arange(4).repeat_interleave(counts)[torch.randperm(int(counts.sum()))]
    labels, corners = torch.randint(CLASSES, (len(owner),)), torch.randint(6, (len(owner), 2))
    return {"x": images()()["x"], "owner": owner, "corners": corners, "y": labels}


def one_regions(batch: Batch, n: int) -> Batch:
    """Those of one image."""
    own = batch["owner"] == n
    owner = torch.zeros(int(own.sum()), dtype=torch.long)
    corners, labels = batch["corners"][own], batch["y"][own]
    return {"x": batch["x"][n : n + 1], "owner": owner, "corners": corners, "y": labels}


def regions_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy over all regions."""
    return cross_entropy(model(batch["x"], batch["owner"], batch["corners"]), batch["y"])


def regions_count(batch: Batch) -> float:
    """How many regions there are."""
    return float(len(batch["y"]))


def noisy() -> Batch:
    """Images, noise and times."""
    batch = images()()
    return {**batch, "noise": torch.randn_like(batch["x"]), "time": torch.randint(5, (4,))}


class Variational(nn.Module):
    """An autoencoder whose noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(128, 8), nn.Linear(4, 128)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The image, means and logarithms of variances."""
        mean, log_variance = self.encoder(x.flatten(1)).chunk(2, 1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def evidence(model: nn.Module, batch: Batch) -> Tensor:
    """The negative lower bound on the evidence."""
    image, mean, log_variance = model(batch["x"], batch["noise"][:, 0, 0, :4])
    error = (image - batch["x"].flatten(1)).square().sum(1)
    divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(1)
    return (error + divergence).mean()


def _bodies() -> dict[str, Callable[[], nn.Module]]:
    """Networks of images ``[N, 2, 8, 8]``, by name."""
    return {
        "Swin": lambda: Pooled(Windows()),
        "Swin, windows of 2": lambda: Pooled(Windows(2)),
        "ViT, T = N": partial(Patches, 8),
        "modulated convolution": lambda: Pooled(Modulated()),
        "standardised weights": lambda: Pooled(Standardised(2, C, 3), nn.ReLU()),
        "spatial transformer": lambda: Pooled(Aligned()),
        "local kernels": lambda: Pooled(Local()),
        "dilated, strided, without padding": lambda: Pooled(
            nn.Conv2d(2, C, 3, 2, 0, 2), nn.PReLU(C), nn.Conv2d(C, C, 2, bias=False)
        ),
        "reflected padding": lambda: Pooled(nn.Conv2d(2, C, 3, padding=1, padding_mode="reflect")),
        "transposed, in groups": lambda: Pooled(
            nn.ConvTranspose2d(2, C, 3, 2, 1, 1, groups=2), nn.Softplus()
        ),
        "channels last": lambda: Pooled(nn.Conv2d(2, C, 3), nn.ELU()).to(
            memory_format=torch.channels_last
        ),
    }


def networks() -> list[Network]:
    """All of them."""
    found = [Network(name, KIND, build, images(), classify) for name, build in _bodies().items()]
    return [
        *found,
        *also_told(
            Network(
                "regions",
                KIND,
                Regions,
                regions_batch,
                regions_loss,
                units=regions_count,
                one=one_regions,
            )
        ),
        Network("variational autoencoder", KIND, Variational, noisy, evidence),
    ]
