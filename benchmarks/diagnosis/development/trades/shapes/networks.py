"""Networks for graphs, trees and clouds of points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.trades.shapes import data


class SampleAndAggregate(nn.Module):
    """What a node is, and the mean of those around it (Hamilton et al., 2017)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.own, self.around = nn.Linear(inside, outside), nn.Linear(inside, outside, bias=False)
        self.activation = nn.ReLU()

    def forward(self, shares: Tensor, nodes: Tensor) -> Tensor:
        """``shares`` are rows of the adjacency that add up to 1."""
        return self.activation(self.own(nodes) + self.around(shares.to(nodes.dtype) @ nodes))


class LinkPredictor(nn.Module):
    """Products of what nodes are mapped to, as logits of whether they are joined."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = SampleAndAggregate(data.TRAITS, width)
        self.second = SampleAndAggregate(width, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        edges, traits, pairs = x.split(
            [data.PEOPLE**2, data.PEOPLE * data.TRAITS, 2 * data.ASKED], 1
        )
        knows = edges.unflatten(1, (data.PEOPLE, data.PEOPLE))
        shares = knows / knows.sum(2, keepdim=True).clamp(min=1)
        nodes = traits.unflatten(1, (data.PEOPLE, data.TRAITS))
        nodes = self.second(shares, self.first(shares, nodes))
        first, second = pairs.long().unflatten(1, (data.ASKED, 2)).unbind(2)
        rows = torch.arange(len(x))[:, None]
        return self.head(nodes[rows, first] * nodes[rows, second])[..., 0]


class TreeMemory(nn.Module):
    """A memory that goes from the leaves to the root (Tai et al., 2015)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.leaf = nn.Linear(1, 2 * width)
        self.kinds = nn.Embedding(data.KINDS, width)
        self.gates = nn.Linear(3 * width, 5 * width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        values, kinds = x.tensor_split([data.LEAVES], 1)
        state, cell = self.leaf(values[..., None]).chunk(2, 2)
        joints = self.kinds(kinds.round().long().clamp(0, data.KINDS - 1))
        start = 0
        while state.shape[1] > 1:
            pairs, cells = state.unflatten(1, (-1, 2)), cell.unflatten(1, (-1, 2))
            count = pairs.shape[1]
            joint = joints[:, start : start + count]
            gates = self.gates(torch.cat([pairs.flatten(2), joint.to(pairs.dtype)], 2)).chunk(5, 2)
            kept, other, added, shown = (gate.sigmoid() for gate in gates[:4])
            cell = kept * cells[:, :, 0] + other * cells[:, :, 1] + added * gates[4].tanh()
            state = shown * cell.tanh()
            start += count
        return self.head(state[:, 0])


class FoldingNetwork(nn.Module):
    """A sheet is folded to points by what is known of others (Yang et al., 2018)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.points = nn.Sequential(
            *(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2 * width), nn.ReLU()),
            nn.Linear(2 * width, width),
        )
        side = torch.linspace(-1, 1, 8)
        self.sheet = nn.Buffer(torch.cartesian_prod(side, side[: data.WHOLE // 8] * 1.5))
        self.fold = nn.Sequential(
            *(nn.Linear(width + 2, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU()),
            nn.Linear(width, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        code = self.points(x).amax(1, keepdim=True)
        sheet = self.sheet.to(code.dtype).expand(len(x), -1, -1)
        return self.fold(torch.cat([sheet, code.expand(-1, sheet.shape[1], -1)], 2))


class EquivariantNetwork(nn.Module):
    """Vectors that turn with the particles (Satorras et al., 2021), with two layers of messages."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.message = nn.Sequential(
            *(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        )
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.strength = nn.Sequential(
            *(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        places, nodes = x[..., :3], self.embed(x[..., 3:])
        apart = places[:, :, None] - places[:, None]
        squared = apart.square().sum(3, keepdim=True)
        messages = self.message(self._pairs(nodes, squared)).mean(2)
        nodes = nodes + self.update(torch.cat([nodes, messages], 2))
        strength = self.strength(self._pairs(nodes, squared))
        return (strength * apart / (squared + 1).sqrt()).sum(2)

    @staticmethod
    def _pairs(nodes: Tensor, squared: Tensor) -> Tensor:
        """Both particles of each pair, and how far apart they are."""
        count = nodes.shape[1]
        first = nodes[:, :, None].expand(-1, -1, count, -1)
        near = (1 + squared).log().to(nodes.dtype)
        return torch.cat([first, first.transpose(1, 2), near], 3)
