"""Networks for tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import SelfAttention
from benchmarks.diagnosis.development.residual import Residual


def softplus_network(inputs: int = 4, width: int = 16, classes: int = 3) -> nn.Module:
    """Two hidden layers of softplus units."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus()),
        nn.Linear(width, classes),
    )


def deep_residual(inputs: int = 10, width: int = 64, blocks: int = 6) -> nn.Module:
    """A logit from a deep residual network with batch normalisation and Mish."""

    def block() -> nn.Module:
        return Residual(
            *(nn.BatchNorm1d(width), nn.Mish(), nn.Linear(width, width)),
            *(nn.BatchNorm1d(width), nn.Mish(), nn.Linear(width, width)),
        )

    return nn.Sequential(
        *(nn.Linear(inputs, width), *(block() for _ in range(blocks))),
        *(nn.BatchNorm1d(width), nn.Mish(), nn.Linear(width, 1)),
    )


def without_biases(inputs: int = 20, width: int = 48, classes: int = 5) -> nn.Module:
    """Residual blocks whose parameters are all matrices, as Muon needs them."""

    def block() -> nn.Module:
        return Residual(
            nn.RMSNorm(width, elementwise_affine=False),
            *(nn.Linear(width, 2 * width, bias=False), nn.SiLU()),
            nn.Linear(2 * width, width, bias=False),
        )

    return nn.Sequential(
        *(nn.Linear(inputs, width, bias=False), block(), block(), block()),
        nn.RMSNorm(width, elementwise_affine=False),
        nn.Linear(width, classes, bias=False),
    )


def regularised(inputs: int = 30, width: int = 64, outputs: int = 8) -> nn.Module:
    """Batch normalisation and dropout in each layer."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(width, outputs),
    )


class FeatureTransformer(nn.Module):
    """Embedded codes attend to each other (Huang et al., 2020); gives the logarithm of a rate."""

    def __init__(self, factors: tuple[int, ...], width: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, width) for count in factors)
        self.layers = nn.Sequential(*(self._layer(width) for _ in range(2)))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(width * len(factors), 1))

    @staticmethod
    def _layer(width: int) -> nn.Sequential:
        return nn.Sequential(
            Residual(nn.LayerNorm(width), SelfAttention(width, 2)),
            Residual(
                *(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GLU()),
                nn.Linear(2 * width, width),
            ),
        )

    def forward(self, x: Tensor) -> Tensor:
        embedded = [table(code) for table, code in zip(self.embeddings, x.unbind(1), strict=True)]
        return self.head(self.layers(torch.stack(embedded, 1)))


class SparseMixture(nn.Module):
    """Of several experts, the two with the largest probabilities count (Shazeer et al., 2017).

    The outputs are a prediction and the gate's probabilities, ``[N, 1 + experts]``.
    """

    def __init__(self, inputs: int = 8, width: int = 24, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, 1))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(1)
        least = probabilities.topk(2, 1).values[:, -1:]
        kept = probabilities * (probabilities >= least)
        outputs = torch.cat([expert(x) for expert in self.experts], 1)
        weighted = outputs * kept / kept.sum(1, keepdim=True)
        return torch.cat([weighted.sum(1, keepdim=True), probabilities], 1)


def mixture_density(
    inputs: int = 2, width: int = 40, outputs: int = 2, parts: int = 3
) -> nn.Module:
    """Logits, means and logarithmic deviations of a mixture's parts (Bishop, 1994)."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.CELU(), nn.Linear(width, width), nn.CELU()),
        *(nn.Linear(width, parts * (1 + 2 * outputs)), nn.Unflatten(1, (parts, -1))),
    )


def scorer(features: int = 8, width: int = 32) -> nn.Module:
    """A score for each of several results ``[N, results, features]``."""
    return nn.Sequential(
        *(nn.Linear(features, width), nn.LayerNorm(width), nn.SiLU()),
        *(nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU()),
        *(nn.Linear(width, 1), nn.Flatten()),
    )


class CrossNetwork(nn.Module):
    """Products of inputs by cross layers, beside a network (Wang et al., 2021)."""

    def __init__(self, inputs: int = 12, width: int = 32, crosses: int = 2) -> None:
        super().__init__()
        self.crosses = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(crosses))
        self.deep = nn.Sequential(
            *(nn.Linear(inputs, width), nn.LeakyReLU(), nn.Linear(width, width), nn.LeakyReLU())
        )
        self.head = nn.Linear(inputs + width, 2)

    def forward(self, x: Tensor) -> Tensor:
        crossed = x
        for layer in self.crosses:
            crossed = x * layer(crossed) + crossed
        return self.head(torch.cat([crossed, self.deep(x)], 1))
