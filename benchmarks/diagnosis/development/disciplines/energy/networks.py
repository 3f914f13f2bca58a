"""Networks for energy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import SelfAttention
from benchmarks.diagnosis.development.disciplines.energy import data
from benchmarks.diagnosis.development.residual import Residual


class InvertedTransformer(nn.Module):
    """Each of several series is a token (Liu et al., 2024)."""

    def __init__(self, past: int = 32, future: int = 8, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Linear(past, width)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    *(Residual(SelfAttention(width, 4)), nn.LayerNorm(width)),
                    Residual(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
                    nn.LayerNorm(width),
                )
                for _ in range(2)
            )
        )
        self.head = nn.Linear(width, future)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x.transpose(1, 2)))).transpose(1, 2)


class BatteryNetwork(nn.Module):
    """Convolutions over each cycle, and a memory from one cycle to the next."""

    def __init__(self, width: int = 8, size: int = 24) -> None:
        super().__init__()
        self.cycle = nn.Sequential(
            *(nn.Conv1d(1, width, 5, 2, 2), nn.GELU(), nn.Conv1d(width, width, 5, 2, 2)),
            *(nn.GELU(), nn.Flatten(), nn.Linear(6 * width, size), nn.GELU()),
        )
        self.memory = nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        cycles = self.cycle(x.flatten(0, 1)[:, None]).unflatten(0, x.shape[:2])
        return self.head(self.memory(cycles)[0][:, -1])


def sequence_to_point(length: int = 64, width: int = 12, outputs: int = 4) -> nn.Module:
    """What happens in the middle of a window (Zhang et al., 2018)."""
    return nn.Sequential(
        *(nn.Conv1d(1, width, 9, padding=4), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(width, width, 7, padding=3), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(width, width, 5, padding=2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(width * length // 4, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, outputs)),
    )


class ChebyshevConvolution(nn.Module):
    """Polynomials of a graph's Laplacian (Defferrard et al., 2016)."""

    def __init__(self, inside: int, outside: int, order: int = 4) -> None:
        super().__init__()
        strengths = data.lines()
        scale = strengths.sum(1).rsqrt()
        self.order = order
        self.laplacian = nn.Buffer(-scale[:, None] * strengths * scale)
        self.mix = nn.Linear(order * inside, outside)

    def forward(self, x: Tensor) -> Tensor:
        terms = [x, self.laplacian @ x]
        while len(terms) < self.order:
            terms.append(2 * self.laplacian @ terms[-1] - terms[-2])
        return self.mix(torch.cat(terms[: self.order], 2))


class GridNetwork(nn.Module):
    """A number for each bus by what it and others feed in."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(ChebyshevConvolution(1, width), nn.SiLU(), ChebyshevConvolution(width, width)),
            *(nn.SiLU(), ChebyshevConvolution(width, width), nn.SiLU(), nn.Linear(width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[..., None])[..., 0]


class TurbineMixture(nn.Module):
    """Curves of power for ranges of wind, with a hidden layer that all of them see."""

    def __init__(self, inputs: int = 5, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.SiLU())
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, 1)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        shared, weights = self.shared(x), self.gate(x).softmax(1)
        powers = torch.cat([expert(shared) for expert in self.experts], 1)
        return (weights * powers).sum(1, keepdim=True)


class Maxout(nn.Module):
    """The largest of several linear functions (Goodfellow et al., 2013)."""

    def __init__(self, inputs: int, outputs: int, pieces: int = 3) -> None:
        super().__init__()
        self.pieces = pieces
        self.linear = nn.Linear(inputs, outputs * pieces)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(1, (-1, self.pieces)).amax(2)


def maxout_network(inputs: int = 8, width: int = 24, outputs: int = 3) -> nn.Module:
    """Two layers, each of which is normalised."""
    return nn.Sequential(
        *(Maxout(inputs, width), nn.BatchNorm1d(width), Maxout(width, width)),
        *(nn.BatchNorm1d(width), nn.Linear(width, outputs)),
    )
