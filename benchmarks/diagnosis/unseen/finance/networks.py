"""Networks for finance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.unseen.finance import data


class GalerkinLayer(nn.Module):
    """Gates that see the inputs again at each layer (Sirignano and Spiliopoulos, 2018)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.kept, self.reset, self.mixed = (
            nn.Sequential(nn.Linear(inputs + width, width), nn.Sigmoid()),
            nn.Sequential(nn.Linear(inputs + width, width), nn.Sigmoid()),
            nn.Sequential(nn.Linear(inputs + width, width), nn.Tanh()),
        )

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        both = torch.cat([x, state], 1)
        kept = self.kept(both)
        mixed = self.mixed(torch.cat([x, self.reset(both) * state], 1))
        return (1 - kept) * mixed + kept * state


class OptionNetwork(nn.Module):
    """Two such layers."""

    def __init__(self, inputs: int = 4, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
        self.layers = nn.ModuleList(GalerkinLayer(inputs, width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = self.enter(x)
        for layer in self.layers:
            state = layer(x, state)
        return self.head(state)


class RepairNetwork(nn.Module):
    """Embeddings of make and region beside numbers, and a linear way (Schelldorfer, 2019)."""

    def __init__(self, size: int = 4, width: int = 32) -> None:
        super().__init__()
        self.make, self.region = nn.Embedding(data.MAKES, size), nn.Embedding(data.REGIONS, size)
        self.linear = nn.Linear(2 * size + 4, 1)
        self.hidden = nn.Sequential(
            *(nn.Linear(2 * size + 4, width), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        make, region = self.make(x[:, 0].long()), self.region(x[:, 1].long())
        joined = torch.cat([make, region, x[:, 2:]], 1)
        return self.linear(joined) + self.hidden(joined)


class Volatility(nn.Module):
    """Mean squares over the last days, weeks and months (Corsi, 2009), and layers on top."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.spans = (3, 6, 12, 24, 48)
        self.layers = nn.Sequential(
            *(nn.Linear(len(self.spans), width), nn.SiLU()),
            *(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        means = [x[:, -span:].square().mean(1) for span in self.spans]
        return self.layers((torch.stack(means, 1) + 1e-3).log())


class OrderBookNetwork(nn.Module):
    """Convolutions over levels and time, and a memory (Zhang et al., 2019)."""

    def __init__(self, levels: int = 5, width: int = 12, size: int = 24, classes: int = 3) -> None:
        super().__init__()
        self.books = nn.Sequential(
            *(nn.Conv2d(2, width, (levels, 1)), nn.BatchNorm2d(width), nn.LeakyReLU(0.01)),
            *(nn.Conv2d(width, width, (1, 4), (1, 2)), nn.BatchNorm2d(width), nn.LeakyReLU(0.01)),
            *(nn.Conv2d(width, width, (1, 3)), nn.BatchNorm2d(width), nn.LeakyReLU(0.01)),
        )
        self.memory = nn.LSTM(width, size, batch_first=True)
        self.head = nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.books(x.unflatten(1, (2, -1)))[:, :, 0].transpose(1, 2)
        return self.head(self.memory(seen)[0][:, -1])


class MortgageMixture(nn.Module):
    """Experts whose logits are mixed by a gate that sees hidden units too."""

    def __init__(self, inputs: int = 7, width: int = 24, experts: int = 5) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, 1))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(self.look(x)).softmax(1)
        scores = torch.cat([expert(x) for expert in self.experts], 1)
        return (weights * scores).sum(1, keepdim=True)
