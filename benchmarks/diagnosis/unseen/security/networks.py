"""Networks for security."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.residual import Residual
from benchmarks.diagnosis.unseen.security import data


class HostNetwork(nn.Module):
    """Memories both ways, and the largest of each number over the name (Lai et al., 2015)."""

    def __init__(self, size: int = 16, width: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(data.LETTERS, size)
        self.memory = nn.GRU(size, width, batch_first=True, bidirectional=True)
        self.join = nn.Sequential(nn.Linear(size + 2 * width, 48), nn.Tanh())
        self.head = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        letters = self.embed(x)
        seen = self.join(torch.cat([letters, self.memory(letters)[0]], 2))
        return self.head(seen.amax(1))


class CausalDepthwise(nn.Module):
    """Each channel sees the last places of itself."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.convolution = nn.Conv1d(width, width, size, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(x.transpose(1, 2), (self.size - 1, 0))
        return self.convolution(past).transpose(1, 2)


class LogNetwork(nn.Module):
    """Residual blocks of light convolutions over the lines before (Wu et al., 2019)."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(data.EVENTS, width)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    Residual(
                        nn.LayerNorm(width), nn.Linear(width, width), CausalDepthwise(width, 7)
                    ),
                    Residual(
                        *(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU()),
                        *(nn.Dropout(0.1), nn.Linear(2 * width, width)),
                    ),
                )
                for _ in range(blocks)
            ),
            nn.LayerNorm(width),
        )
        self.head = nn.Linear(width, data.EVENTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x))).transpose(1, 2)


def trace_network(length: int = 96, width: int = 8, classes: int = 5) -> nn.Module:
    """Convolutions and averages with exponential units (Zaid et al., 2020)."""
    return nn.Sequential(
        *(nn.BatchNorm1d(1), nn.Conv1d(1, width, 7, padding=3), nn.ELU(), nn.AvgPool1d(2)),
        *(nn.Conv1d(width, 2 * width, 7, padding=3), nn.BatchNorm1d(2 * width), nn.ELU()),
        *(nn.AvgPool1d(4), nn.Flatten(), nn.Linear(length * width // 4, 24), nn.ELU()),
        nn.Linear(24, classes),
    )


class ConnectionNetwork(nn.Module):
    """Embeddings that scale and shift the numbers' hidden units (Perez et al., 2018)."""

    def __init__(self, width: int = 48, classes: int = 5) -> None:
        super().__init__()
        self.protocol, self.service = nn.Embedding(3, 2 * width), nn.Embedding(10, 2 * width)
        for table in (self.protocol, self.service):
            nn.init.normal_(table.weight, std=0.3)
        self.numbers = nn.Sequential(nn.Linear(7, width), nn.LayerNorm(width))
        self.layers = nn.Sequential(
            *(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)),
            nn.Linear(width, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        changes = self.protocol(x[:, 0].long()) + self.service(x[:, 1].long())
        scale, shift = changes.chunk(2, 1)
        return self.layers((1 + scale) * self.numbers(x[:, 2:]) + shift)


class PacketMixture(nn.Module):
    """Linear experts on hidden units, of which a gate mixes the logits."""

    def __init__(self, inputs: int = 28, width: int = 48, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU())
            for _ in range(experts)
        )
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 6))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        hidden = torch.stack([expert(x) for expert in self.experts], 2)
        return self.head((hidden * weights[:, None]).sum(2))
