"""Networks for tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.trades.records import data


def sparse_shares(logits: Tensor) -> Tensor:
    """The nearest point at which shares add up to 1, mostly zeros (Martins and Astudillo, 2016)."""
    ordered = logits.sort(1, descending=True).values
    counts = torch.arange(1, logits.shape[1] + 1, device=logits.device)
    above = (ordered.cumsum(1) - 1) / counts
    used = (ordered > above).sum(1, keepdim=True)
    return (logits - above.gather(1, used - 1)).clamp(min=0)


class TabNet(nn.Module):
    """Each step looks at a few of the columns (Arik and Pfister, 2021)."""

    def __init__(self, inputs: int = 12, width: int = 32, steps: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.first = self._layers(inputs, width)
        self.choices = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inputs, bias=False), nn.BatchNorm1d(inputs))
            for _ in range(steps)
        )
        self.steps = nn.ModuleList(self._layers(inputs, width) for _ in range(steps))
        self.head = nn.Linear(width, classes)

    @staticmethod
    def _layers(inputs: int, width: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(inputs, 2 * width), nn.BatchNorm1d(2 * width), nn.GLU(1)),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        seen, total = self.first(x), torch.zeros(())
        for choice, step in zip(self.choices, self.steps, strict=True):
            seen = step(sparse_shares(choice(seen).float()) * x * 4)
            total = total + seen
        return self.head(total)


class InterestNetwork(nn.Module):
    """What was looked at counts by how it goes with what is offered (Zhou et al., 2018)."""

    def __init__(self, size: int = 8, width: int = 32) -> None:
        super().__init__()
        self.articles = nn.Embedding(data.ARTICLES, size)
        self.weights = nn.Sequential(nn.Linear(4 * size, 16), nn.PReLU(), nn.Linear(16, 1))
        self.layers = nn.Sequential(
            *(nn.Linear(3 * size, width), nn.PReLU(), nn.Linear(width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        offered, seen = self.articles(x).tensor_split([1], 1)
        pairs = offered.expand_as(seen)
        weights = self.weights(torch.cat([pairs, seen, pairs - seen, pairs * seen], 2))
        interest, offer = (weights * seen).sum(1), offered[:, 0]
        return self.layers(torch.cat([interest, offer, interest * offer], 1))


def durations(inputs: int = 8, width: int = 32) -> nn.Module:
    """A logarithmic scale and a logarithmic shape."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.LayerNorm(width), nn.SiLU()),
        *(nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, 2)),
    )


def spending(inputs: int = 10, width: int = 40) -> nn.Module:
    """A logit of whether, and a logarithmic mean and deviation of how much."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 3),
    )


class ListScorer(nn.Module):
    """Scores ``[N, HOTELS]``, each by a hotel and the mean of its list."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(data.ABOUT, width), nn.Mish())
        self.score = nn.Sequential(
            *(nn.Linear(2 * width, width), nn.Mish(), nn.Linear(width, width), nn.Mish()),
            nn.Linear(width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        hotels = self.embed(x)
        context = hotels.mean(1, keepdim=True).expand_as(hotels)
        return self.score(torch.cat([hotels, context], 2))[..., 0]


class SharedExperts(nn.Module):
    """Experts that a gate weights, and a tower for each of two tasks (Ma et al., 2018)."""

    def __init__(self, inputs: int = 12, width: int = 24, experts: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            for _ in range(experts)
        )
        self.gate = nn.Linear(inputs, experts)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        shared = (weights[..., None] * outputs).sum(1)
        return torch.cat([tower(shared) for tower in self.towers], 1)


def share_network(inputs: int = 7, width: int = 32) -> nn.Module:
    """The logarithms of both parameters of a beta distribution."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.Softsign(), nn.Linear(width, width), nn.Softsign()),
        nn.Linear(width, 2),
    )


class SongTaste(nn.Module):
    """By how much a listener prefers one song to another (Rendle et al., 2009)."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.listeners = nn.Embedding(data.LISTENERS, size)
        self.songs = nn.Embedding(data.SONGS, size)
        self.fame = nn.Embedding(data.SONGS, 1)
        for table in (self.listeners, self.songs, self.fame):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        listener, songs, fame = self.listeners(x[:, 0]), self.songs(x[:, 1:]), self.fame(x[:, 1:])
        merits = (songs * listener[:, None]).sum(2) + fame[..., 0]
        return merits[:, :1] - merits[:, 1:]


class CurveLayer(nn.Module):
    """A curve for each pair of an input and an output (Liu et al., 2024), as a sum of bumps."""

    def __init__(self, inputs: int, outputs: int, bumps: int = 8) -> None:
        super().__init__()
        self.centres = nn.Buffer(torch.linspace(-2, 2, bumps))
        self.norm = nn.LayerNorm(inputs)
        self.curves = nn.Linear(inputs * bumps, outputs)
        self.straight = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        bumps = (-(((self.norm(x)[..., None] - self.centres) / 0.57) ** 2)).exp()
        return self.curves(bumps.flatten(1)) + self.straight(x)


def curve_network(inputs: int = 5, width: int = 8) -> nn.Module:
    """Two layers of curves."""
    return nn.Sequential(CurveLayer(inputs, width), CurveLayer(width, 1))


class AdditiveNetwork(nn.Module):
    """A small network for each column, the outputs of which are added (Agarwal et al., 2021)."""

    def __init__(self, inputs: int = 8, width: int = 16) -> None:
        super().__init__()
        self.columns = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(1, width), nn.ELU(), nn.Linear(width, width), nn.ELU()),
                nn.Linear(width, 1, bias=False),
            )
            for _ in range(inputs)
        )
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        columns = x.split(1, 1)
        parts = [layers(c) for layers, c in zip(self.columns, columns, strict=True)]
        return torch.cat(parts, 1).sum(1, keepdim=True) + self.bias
