"""Networks for tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.fields.tables import data


class FactorisationMachine(nn.Module):
    """Each code has a value, and each pair of codes a product (Rendle, 2010).

    The outputs are the logits that a grade is above each but the last one.
    """

    def __init__(self, fields: tuple[int, ...], width: int = 6, grades: int = 5) -> None:
        super().__init__()
        self.values = nn.ModuleList(nn.Embedding(count, 1) for count in fields)
        self.vectors = nn.ModuleList(nn.Embedding(count, width) for count in fields)
        self.bounds = nn.Parameter(torch.linspace(1.5, -1.5, grades - 1))
        for table in (*self.values, *self.vectors):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        codes = x.unbind(1)
        alone = torch.cat([table(c) for table, c in zip(self.values, codes, strict=True)], 1)
        vectors = torch.stack([table(c) for table, c in zip(self.vectors, codes, strict=True)], 1)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        return alone.sum(1, keepdim=True) + pairs + self.bounds


class TwoTowers(nn.Module):
    """Products of what a customer and each of several offers is mapped to (Huang et al., 2013)."""

    def __init__(self, width: int = 32, size: int = 12) -> None:
        super().__init__()
        self.customer, self.offer = (
            nn.Sequential(
                *(nn.Linear(inputs, width), nn.LeakyReLU(), nn.LayerNorm(width)),
                *(nn.Linear(width, width), nn.LeakyReLU(), nn.Linear(width, size)),
            )
            for inputs in (data.CUSTOMER, data.OFFER)
        )

    def forward(self, x: Tensor) -> Tensor:
        customer, offers = x.tensor_split([data.CUSTOMER], 1)
        vectors = self.offer(offers.unflatten(1, (data.OFFERS, data.OFFER)))
        return (vectors @ self.customer(customer)[..., None])[..., 0]


def survival_network(inputs: int = 9, width: int = 32, periods: int = data.PERIODS) -> nn.Module:
    """The logit of each period's hazard."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)),
        nn.Linear(width, periods),
    )


class MeanAndDeviation(nn.Module):
    """Two networks of the same inputs: one for the mean, one for the logarithmic deviation."""

    def __init__(self, inputs: int = 4, width: int = 24) -> None:
        super().__init__()
        self.mean, self.deviation = (
            nn.Sequential(
                *(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
                nn.Linear(width, 1),
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.mean(x), self.deviation(x)], 1)


class SoftTrees(nn.Module):
    """Trees with the same split in all nodes of a depth (Popov et al., 2020)."""

    def __init__(self, inputs: int = 10, trees: int = 24, depth: int = 4, classes: int = 4) -> None:
        super().__init__()
        self.depth = depth
        self.choice = nn.Parameter(torch.randn(inputs, trees, depth))
        self.threshold = nn.Parameter(0.5 * torch.randn(trees, depth))
        self.steepness = nn.Parameter(torch.zeros(trees, depth))
        self.answer = nn.Parameter(torch.randn(trees, 2**depth, classes))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.einsum("ni,itd->ntd", x, self.choice.softmax(0))
        right = ((chosen - self.threshold) * (1 + self.steepness).exp()).sigmoid()
        sides = torch.stack([1 - right, right], 3)
        leaves = sides[:, :, 0]
        for depth in range(1, self.depth):
            leaves = (leaves[..., None] * sides[:, :, depth, None]).flatten(2)
        return torch.einsum("ntl,tlc->nc", leaves, self.answer) / leaves.shape[1] ** 0.5


class DamageMixture(nn.Module):
    """Experts that each give the logarithm of a mean, weighted by a gate."""

    def __init__(self, inputs: int = 8, width: int = 20, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.ELU(), nn.Linear(width, 1))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        outputs = torch.cat([expert(x) for expert in self.experts], 1)
        return (weights * outputs).sum(1, keepdim=True)


class Embedder(nn.Module):
    """Maps rows to a sphere."""

    def __init__(self, inputs: int = 24, width: int = 48, size: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.SiLU()),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.SiLU()),
            nn.Linear(width, size),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(x), dim=1)
