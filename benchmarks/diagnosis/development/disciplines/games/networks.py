"""Networks for games."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import Attention
from benchmarks.diagnosis.development.disciplines.games import data
from benchmarks.diagnosis.development.residual import Residual


class BoardNetwork(nn.Module):
    """Moves and the worth of a position, with residual blocks (Silver et al., 2017)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *self._layer(2, width),
            *(Residual(*self._layer(width, width), *self._layer(width, width)) for _ in range(2)),
        )
        self.moves = nn.Sequential(
            *(nn.Conv2d(width, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            nn.Linear(36, 9),
        )
        self.worth = nn.Sequential(
            *(nn.Conv2d(width, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(18, 24), nn.ReLU(), nn.Linear(24, 1), nn.Tanh()),
        )

    @staticmethod
    def _layer(inside: int, outside: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        return (convolution, nn.BatchNorm2d(outside), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        seen = self.body(x)
        return torch.cat([self.moves(seen), self.worth(seen)], 1)


class TrickTaker(nn.Module):
    """Embeddings beside each other, a hidden layer and a straight way (Bengio et al., 2003)."""

    def __init__(self, size: int = 16, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(data.CARDS + 4, size), nn.Flatten())
        self.hidden = nn.Sequential(
            *(nn.Linear(5 * size, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
            nn.Linear(width, 4),
        )
        self.straight = nn.Linear(5 * size, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        cards = self.embed(x)
        return self.hidden(cards) + self.straight(cards)


class CellularAutomaton(nn.Module):
    """Cells that change by the same rule several times (Mordvintsev et al., 2020)."""

    def __init__(self, width: int = 12, hidden: int = 32, times: int = 2) -> None:
        super().__init__()
        self.times = times
        self.enter = nn.Conv2d(1, width, 1)
        self.rule = Residual(
            nn.Conv2d(width, hidden, 3, padding=1, padding_mode="circular"),
            *(nn.ReLU(), nn.Conv2d(hidden, width, 1)),
        )
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        cells = self.enter(x)
        for _ in range(self.times):
            cells = self.rule(cells)
        return self.leave(cells)


class BladeAndChest(nn.Module):
    """Strengths, and vectors by which one player hits another (Chen and Joachims, 2016)."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.strength = nn.Embedding(data.PLAYERS, 1)
        self.blade, self.chest = (nn.Embedding(data.PLAYERS, size) for _ in range(2))
        self.draws = nn.Parameter(torch.zeros(1))
        for table in (self.strength, self.blade, self.chest):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        strength, blade, chest = self.strength(x)[..., 0], self.blade(x), self.chest(x)
        hits = (blade * chest.flip(1)).sum(2)
        lead = (strength + hits)[:, :1] - (strength + hits)[:, 1:]
        return torch.cat([lead, self.draws.expand(len(x), 1)], 1)


class ValueIteration(nn.Module):
    """Values of places by the best of what is beside them, again and again (Tamar et al., 2016)."""

    def __init__(self, width: int = 24, ways: int = 8, times: int = 7) -> None:
        super().__init__()
        self.times = times
        self.reward = nn.Sequential(
            nn.Conv2d(2, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1, bias=False)
        )
        self.look = nn.Conv2d(2, ways, 3, padding=1, bias=False)
        self.head = nn.Linear(ways, 4)

    def forward(self, x: Tensor) -> Tensor:
        reward, walker = self.reward(x[:, :2]), x[:, 2:]
        value = torch.zeros_like(reward)
        for _ in range(self.times):
            ways = self.look(torch.cat([reward, value], 1))
            value = ways.amax(1, keepdim=True)
        return self.head((ways * walker).sum((2, 3)))


class CausalLayer(nn.Module):
    """Attention to what is earlier, then linear layers with a GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.layers = Residual(
            *(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()),
            *(nn.Linear(2 * width, width), nn.Dropout(0.05)),
        )

    def forward(self, x: Tensor) -> Tensor:
        later = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        known = self.norm(x)
        return self.layers(x + self.attention(known, known, later))


class DecisionTransformer(nn.Module):
    """Moves as the continuation of points, states and moves (Chen et al., 2021)."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.points, self.state, self.before = (nn.Linear(size, width) for size in (1, 2, 1))
        self.times = nn.Embedding(data.PAST, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(CausalLayer(width, heads), CausalLayer(width, heads))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        points, state, before = x.split([1, 2, 1], 2)
        kinds = [self.before(before), self.points(points), self.state(state)]
        tokens = torch.stack(kinds, 2) + self.times.weight[: x.shape[1], None]
        outputs = self.layers(self.norm(tokens.flatten(1, 2)))
        return self.head(outputs[:, 2::3])[..., 0]


class RaceMixture(nn.Module):
    """Residual experts between two linear layers; a gate adds the best two of them."""

    def __init__(self, inputs: int = 9, width: int = 32, experts: int = 4, best: int = 2) -> None:
        super().__init__()
        self.best = best
        self.enter = nn.Sequential(nn.Linear(inputs, width), nn.GELU())
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(experts)
        )
        self.leave = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.enter(x)
        scores = self.gate(seen)
        least = scores.topk(self.best, 1).values[:, -1:]
        weights = scores.masked_fill(scores < least, -torch.inf).softmax(1)
        parts = torch.stack([expert(seen) for expert in self.experts], 1)
        return self.leave(seen + (weights[..., None] * parts).sum(1))
