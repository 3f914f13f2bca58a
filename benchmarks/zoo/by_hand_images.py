"""Convolutional networks and others of images, and some of sound and volumes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    affine_grid,
    conv2d,
    grid_sample,
    relu,
    unfold,
)

from benchmarks.zoo.by_hand_rows import Build, linear, parameter, parted
from benchmarks.zoo.network import CLASSES, Batch, Network, also_told, classify, numbers
from tests.cases.row_cases import Net

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


def patches(model: Net, x: Tensor) -> Tensor:
    """Patches as tokens, a class token, position embeddings, one encoder layer (ViT)."""
    tokens = model.patch(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([model.token.expand(len(x), -1, -1), tokens], 1) + model.positions
    return model.head(model.layer(tokens)[:, 0])


def modulated(model: Net, x: Tensor) -> Tensor:
    """Each sample's own kernels, with samples folded into groups of one convolution (StyleGAN)."""
    n, _, height, width = x.shape
    style = model.style(x.mean((2, 3))) + 1
    weight = model.weight * style[:, None, :, None, None]
    weight = weight / weight.square().sum((2, 3, 4), keepdim=True).add(1e-8).sqrt()
    folded = conv2d(x.reshape(1, -1, height, width), weight.flatten(0, 1), groups=n, padding=1)
    return folded.view(n, C, height, width)


def aligned(model: Net, x: Tensor) -> Tensor:
    """An image is moved to where a small network wants it (spatial transformer)."""
    where = 0.1 * model.where(x.flatten(1)).view(-1, 2, 3) + torch.eye(2, 3, dtype=x.dtype)
    grid = affine_grid(where, list(x.shape), align_corners=False)
    return model.convolution(grid_sample(x, grid, align_corners=False))


def local(model: Net, x: Tensor) -> Tensor:
    """Each place has its own kernel."""
    return torch.einsum("nip,poi->nop", unfold(x, 3), model.weight)


def regions(model: Net, x: Tensor, owner: Tensor, corners: Tensor) -> Tensor:
    """A head on regions cut out of images, of which each sample has another number.

    Each of R regions has an owner and a corner where it starts.
    """
    hidden = relu(model.body(x))
    cut = [
        hidden[image, :, i : i + 3, j : j + 3]
        for image, (i, j) in zip(owner.tolist(), corners.tolist(), strict=True)
    ]
    return model.head(torch.stack(cut).flatten(1))


def regions_batch() -> Batch:
    """Images with one to three regions each, in any order."""
    counts = torch.randint(1, 4, (4,))
    owner = torch.arange(4).repeat_interleave(counts)[torch.randperm(int(counts.sum()))]
    labels, corners = torch.randint(CLASSES, (len(owner),)), torch.randint(6, (len(owner), 2))
    return {"x": numbers(4, 2, 8, 8)()["x"], "owner": owner, "corners": corners, "y": labels}


def one_regions(batch: Batch, n: int) -> Batch:
    """Those of one image."""
    own = batch["owner"] == n
    owner = torch.zeros(int(own.sum()), dtype=torch.long)
    corners, labels = batch["corners"][own], batch["y"][own]
    return {"x": batch["x"][n : n + 1], "owner": owner, "corners": corners, "y": labels}


def regions_count(batch: Batch) -> float:
    """How many regions there are."""
    return float(len(batch["y"]))


def noisy() -> Batch:
    """Images, noise and times."""
    batch = numbers(4, 2, 8, 8)()
    return {**batch, "noise": torch.randn_like(batch["x"]), "time": torch.randint(5, (4,))}


def variational(model: Net, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An autoencoder whose noise is an input: the image, means and logarithms of variances."""
    mean, log_variance = model.encoder(x.flatten(1)).chunk(2, 1)
    return model.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def evidence(model: nn.Module, batch: Batch) -> Tensor:
    """The negative lower bound on the evidence."""
    image, mean, log_variance = model(batch["x"], batch["noise"][:, 0, 0, :4])
    error = (image - batch["x"].flatten(1)).square().sum(1)
    divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(1)
    return (error + divergence).mean()


def _pooled(*bodies: Build) -> Build:
    return lambda: Pooled(*(body() for body in bodies))


def _convolution(*sizes: int, **options: Any) -> Build:
    return partial(nn.Conv2d, *sizes, **options)


def _bodies() -> dict[str, Build]:
    """Networks of images ``[N, 2, 8, 8]``, by name."""
    style = {"style": linear(2, 2), "weight": parameter(C, 2, 3, 3)}
    moved = {"where": linear(128, 6), "convolution": _convolution(2, C, 3)}
    vision = {
        "patch": _convolution(2, 8, 8, 8),
        "token": parameter(1, 1, 8),
        "positions": parameter(1, 2, 8),
        "layer": partial(nn.TransformerEncoderLayer, 8, 2, 12, 0.0, batch_first=True),
    }
    last = _pooled(_convolution(2, C, 3), nn.ELU)
    return {
        "Swin": _pooled(Windows),
        "Swin, windows of 2": _pooled(partial(Windows, 2)),
        "ViT, T = N": parted(patches, **vision, head=linear(8, CLASSES)),
        "modulated convolution": _pooled(parted(modulated, **style)),
        "spatial transformer": _pooled(parted(aligned, **moved)),
        "local kernels": _pooled(parted(local, weight=parameter(36, C, 18, scale=1 / 4))),
        "channels last": lambda: last().to(memory_format=torch.channels_last),
    }


def networks() -> list[Network]:
    """All of them."""
    cut = parted(regions, body=_convolution(2, C, 3, padding=1), head=linear(C * 9, CLASSES))
    of_regions = {"units": regions_count, "one": one_regions}
    coder = parted(variational, encoder=linear(128, 8), decoder=linear(4, 128))
    return [
        *(
            Network(name, KIND, build, numbers(4, 2, 8, 8), classify)
            for name, build in _bodies().items()
        ),
        *also_told(Network("regions", KIND, cut, regions_batch, classify, **of_regions)),
        Network("variational autoencoder", KIND, coder, noisy, evidence),
    ]
