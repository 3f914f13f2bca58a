"""Networks for images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.residual import Residual


def normalised(inside: int, outside: int, size: int) -> nn.Sequential:
    """A convolution with batch normalisation and rectified linear units."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, size, padding=size // 2, bias=False),
        *(nn.BatchNorm2d(outside), nn.ReLU()),
    )


class Fire(nn.Module):
    """Few channels, of which convolutions of two sizes make many (Iandola et al., 2016)."""

    def __init__(self, inside: int, few: int, each: int) -> None:
        super().__init__()
        self.squeeze = normalised(inside, few, 1)
        self.narrow, self.wide = normalised(few, each, 1), normalised(few, each, 3)

    def forward(self, x: Tensor) -> Tensor:
        squeezed = self.squeeze(x)
        return torch.cat([self.narrow(squeezed), self.wide(squeezed)], 1)


def squeeze_net(width: int = 16, classes: int = 10) -> nn.Module:
    """Iandola et al., 2016, with batch normalisation, for images ``[1, 16, 16]``.

    A convolution gives the classes.
    """
    return nn.Sequential(
        *(normalised(1, width, 3), nn.MaxPool2d(2), Fire(width, 8, width), nn.MaxPool2d(2)),
        *(Fire(2 * width, 12, 2 * width), nn.Conv2d(4 * width, classes, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def res_next(width: int = 16, classes: int = 5) -> nn.Module:
    """Residual blocks of grouped convolutions (Xie et al., 2017), for images ``[1, 20, 20]``."""

    def block(width: int) -> nn.Module:
        return Residual(
            *(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, padding=1, groups=4, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)),
        )

    return nn.Sequential(
        *(nn.Conv2d(1, width, 5, 2, 2, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(block(width), nn.ReLU(), nn.MaxPool2d(2), block(width), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)),
    )


def detector(width: int = 10, outputs: int = 7) -> nn.Module:
    """Outputs for each of 4 x 4 cells of images ``[1, 24, 24]``, from plain convolutions."""

    def layer(inside: int, outside: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        return convolution, nn.BatchNorm2d(outside), nn.LeakyReLU(0.1)

    return nn.Sequential(
        *(*layer(1, width), nn.MaxPool2d(2), *layer(width, 2 * width), nn.MaxPool2d(3)),
        *(*layer(2 * width, 4 * width), nn.Conv2d(4 * width, outputs, 1)),
    )


class Hourglass(nn.Module):
    """Down to a quarter of the resolution and up again, with sums (Newell et al., 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fine, self.middle, self.coarse = (self._block(width) for _ in range(3))
        self.pool = nn.MaxPool2d(2)
        self.spread = nn.Upsample(scale_factor=2)

    @staticmethod
    def _block(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        middle = self.pool(x)
        middle = self.middle(middle) + self.spread(self.coarse(self.pool(middle)))
        return self.fine(x) + self.spread(middle)


class StackedHourglass(nn.Module):
    """Two hourglasses, each of which gives maps of all joints: ``[N, 2, joints, ...]``."""

    def __init__(self, width: int = 12, joints: int = 5) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.SiLU())
        self.stacks = nn.ModuleList(Hourglass(width) for _ in range(2))
        self.heads = nn.ModuleList(nn.Conv2d(width, joints, 1) for _ in range(2))
        self.back = nn.Conv2d(joints, width, 1)
        for head in self.heads.parameters():
            nn.init.normal_(head, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x)
        seen = self.stacks[0](features)
        early = self.heads[0](seen)
        seen = self.stacks[1](features + seen + self.back(early))
        return torch.stack([early, self.heads[1](seen)], 1)


class WindowAttention(nn.Module):
    """Places attend within windows, which may be shifted by half a window (Liu et al., 2021)."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.projections = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, rows, columns, D]``, whose edges meet when they are shifted."""
        samples, rows, _, width = x.shape
        size, parts = self.window, rows // self.window
        shifted = x.roll((-self.shift, -self.shift), (1, 2))
        windows = shifted.unflatten(2, (parts, size)).unflatten(1, (parts, size))
        tokens = windows.transpose(2, 3).reshape(-1, size**2, width)
        heads = self.projections(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.bias.to(heads.dtype)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], bias)
        merged = self.merge(mixed.transpose(1, 2).flatten(2))
        back = merged.view(samples, parts, parts, size, size, width).transpose(2, 3)
        return back.reshape(samples, rows, rows, width).roll((self.shift, self.shift), (1, 2))


class ChannelsLast(nn.Module):
    """Images ``[N, C, H, W]`` as ``[N, H, W, C]``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


class MergedPatches(nn.Module):
    """Four neighbours' channels one behind the other, ``[N, H / 2, W / 2, 4 C]``."""

    def forward(self, x: Tensor) -> Tensor:
        halves = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        return halves.transpose(2, 3).flatten(3)


class OverPlaces(nn.Module):
    """The mean over the places of ``[N, H, W, C]``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((1, 2))


def swin(width: int = 16, classes: int = 6) -> nn.Module:
    """Liu et al., 2021, with two stages, for fields ``[2, 16, 16]``."""

    def block(width: int, window: int, shift: int) -> nn.Module:
        return nn.Sequential(
            Residual(nn.LayerNorm(width), WindowAttention(width, 4, window, shift)),
            Residual(
                *(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()),
                nn.Linear(2 * width, width),
            ),
        )

    return nn.Sequential(
        *(nn.Conv2d(2, width, 2, 2), ChannelsLast(), nn.LayerNorm(width)),
        *(block(width, 4, 0), block(width, 4, 2), MergedPatches(), nn.LayerNorm(4 * width)),
        *(nn.Linear(4 * width, 2 * width, bias=False), block(2 * width, 4, 0)),
        *(nn.LayerNorm(2 * width), OverPlaces(), nn.Linear(2 * width, classes)),
    )


class ConvolutionalMemory(nn.Module):
    """Reads pictures ``[N, T, 1, H, W]`` and gives the next ones (Shi et al., 2015)."""

    def __init__(self, width: int = 12, future: int = 2) -> None:
        super().__init__()
        self.width, self.future = width, future
        self.gates = nn.Conv2d(1 + width, 4 * width, 3, padding=1)
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = torch.zeros(len(x), self.width, *x.shape[-2:])
        for picture in x.unbind(1):
            state, cell = self._step(picture, state, cell)
        predicted = [x[:, -1] + self.head(state)]
        while len(predicted) < self.future:
            state, cell = self._step(predicted[-1], state, cell)
            predicted.append(predicted[-1] + self.head(state))
        return torch.stack(predicted, 1)

    def _step(self, picture: Tensor, state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.gates(torch.cat([picture, state.to(picture.dtype)], 1)).chunk(4, 1)
        kept, added, shown = (gate.sigmoid() for gate in gates[:3])
        cell = kept * cell + added * gates[3].tanh()
        return shown * cell.tanh(), cell


class FeaturePyramid(nn.Module):
    """Features of three resolutions are added from the coarsest on (Lin et al., 2017)."""

    def __init__(self, width: int = 12, classes: int = 3) -> None:
        super().__init__()
        inside = (3, width, 2 * width)
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, width * 2**k, 3, 1 if k == 0 else 2, 1, bias=False),
                *(nn.BatchNorm2d(width * 2**k), nn.ReLU()),
            )
            for k, channels in enumerate(inside)
        )
        self.sideways = nn.ModuleList(nn.Conv2d(width * 2**k, width, 1) for k in range(3))
        self.spread = nn.Upsample(scale_factor=2, mode="bilinear")
        self.head = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, classes, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for layer, sideways in zip(self.down, self.sideways, strict=True):
            x = layer(x)
            levels.append(sideways(x))
        total = self.spread(levels[2]) + levels[1]
        return self.head(self.spread(total) + levels[0])
