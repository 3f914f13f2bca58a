"""Networks for graphs, clouds of points and binary patterns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere


class GraphAttention(nn.Module):
    """Means over neighbours with weights that depend on both (Brody et al., 2022)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.receive, self.send = nn.Linear(inside, outside), nn.Linear(inside, outside)
        self.score = nn.Sequential(nn.LeakyReLU(0.2), nn.Linear(outside, 1, bias=False))

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        sent = self.send(nodes)
        scores = self.score(self.receive(nodes)[:, :, None] + sent[:, None])[..., 0]
        return scores.masked_fill(adjacency == 0, float("-inf")).softmax(2) @ sent


class GraphAttentionNetwork(nn.Module):
    """Two attentions, and a number for each node of a graph ``[nodes, nodes + features]``."""

    def __init__(self, features: int = 2, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, width), nn.ELU())
        self.attend = nn.ModuleList(GraphAttention(width, width) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ELU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        adjacency, features = x.tensor_split([x.shape[1]], 2)
        nodes = self.embed(features)
        seen = [attend(nodes, adjacency) for attend in self.attend]
        return self.head(torch.cat(seen, 2))


class EdgeConvolution(nn.Module):
    """The largest outputs for a point and each of its nearest ones (Wang et al., 2019)."""

    def __init__(self, inside: int, outside: int, neighbours: int) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.layers = nn.Sequential(
            *(nn.Linear(2 * inside, outside), nn.LayerNorm(outside), nn.LeakyReLU(0.2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, points, D]``."""
        nearest = torch.cdist(x.float(), x.float()).topk(self.neighbours, largest=False).indices
        samples = torch.arange(len(x))[:, None, None]
        apart = x[samples, nearest] - x[:, :, None]
        own = x[:, :, None].expand_as(apart)
        return self.layers(torch.cat([own, apart], 3)).amax(2)


class PointSegmenter(nn.Module):
    """Two edge convolutions, what all points have in common, and a class for each of them."""

    def __init__(self, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.first, self.second = EdgeConvolution(3, width, 8), EdgeConvolution(width, width, 8)
        self.head = nn.Sequential(
            *(nn.Linear(3 * width, 2 * width), nn.LeakyReLU(0.2), nn.Linear(2 * width, classes))
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        common = second.amax(1, keepdim=True).expand_as(second)
        return self.head(torch.cat([first, second, common], 2)).transpose(1, 2)


class MaskedLinear(nn.Linear):
    """A linear layer in which some weights don't count."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


def masked_autoencoder(size: int = 64, width: int = 192) -> nn.Module:
    """The logit of each number, from those before it alone (Germain et al., 2015)."""
    places = torch.arange(size)
    degrees = torch.arange(width) % (size - 1)
    first, inner = degrees[:, None] >= places, degrees[:, None] >= degrees
    return nn.Sequential(
        *(MaskedLinear(first), nn.ReLU(), MaskedLinear(inner), nn.ReLU()),
        MaskedLinear(places[:, None] > degrees),
    )
