"""Networks for graphs, interacting bodies and sets of points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import Attention


class IsomorphismLayer(nn.Module):
    """A network of each node and the sum of its neighbours (Xu et al., 2019)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(()))
        self.update = nn.Sequential(
            *(nn.Linear(inside, outside), nn.LayerNorm(outside), nn.SELU()),
            *(nn.Linear(outside, outside), nn.SELU()),
        )

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return self.update((1 + self.own) * nodes + adjacency @ nodes)


class IsomorphismNetwork(nn.Module):
    """A number for a graph ``[nodes, nodes + features]``, from sums over nodes after each layer."""

    def __init__(self, features: int = 4, width: int = 24) -> None:
        super().__init__()
        self.first = IsomorphismLayer(features, width)
        self.second = IsomorphismLayer(width, width)
        self.head = nn.Sequential(
            nn.Linear(2 * width, width), nn.SELU(), nn.Dropout(0.05), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        adjacency, features = x.tensor_split([x.shape[1]], 2)
        first = self.first(features, adjacency)
        second = self.second(first, adjacency)
        return self.head(torch.cat([first, second], 2).mean(1))


class InteractionNetwork(nn.Module):
    """Effects of each body on each other, their sums, and an output for each body.

    Battaglia et al., 2016.
    """

    def __init__(self, features: int = 5, width: int = 32, outputs: int = 2) -> None:
        super().__init__()
        self.effect = nn.Sequential(
            *(nn.Linear(2 * features, width), nn.Tanhshrink(), nn.Linear(width, width), nn.SiLU()),
            nn.Linear(width, width // 2),
        )
        self.update = nn.Sequential(
            nn.Linear(features + width // 2, width), nn.SiLU(), nn.Linear(width, outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        receivers = x[:, :, None].expand(-1, -1, count, -1)
        senders = x[:, None].expand(-1, count, -1, -1)
        effects = self.effect(torch.cat([receivers, senders], 3)).sum(2)
        return self.update(torch.cat([x, effects], 2))


class AttentionBlock(nn.Module):
    """Attention to a set and a feed-forward layer, normalised after each (Lee et al., 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.feed_forward = nn.Sequential(
            nn.Linear(width, width), nn.LeakyReLU(), nn.Linear(width, width)
        )

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = self.norms[0](x + self.attention(x, context))
        return self.norms[1](x + self.feed_forward(x))


class SetTransformer(nn.Module):
    """Points attend to each other by way of a few learnt ones (Lee et al., 2019)."""

    def __init__(self, width: int = 24, induced: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(2, width)
        self.induced = nn.Parameter(torch.randn(induced, width))
        self.seed = nn.Parameter(torch.randn(1, width))
        self.gather, self.spread, self.pool = (AttentionBlock(width, 4) for _ in range(3))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        points = self.embed(x)
        summary = self.gather(self.induced.expand(len(x), -1, -1), points)
        points = self.spread(points, summary)
        return self.head(self.pool(self.seed.expand(len(x), -1, -1), points)[:, 0])
