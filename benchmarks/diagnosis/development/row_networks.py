"""Networks of the development problems that are for tables, sets of points and graphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.nn.utils.parametrizations import spectral_norm


class PointNet(nn.Module):
    """Qi et al., 2017: the same layers for each point, their maxima, and a classifier."""

    def __init__(self, width: int = 24, classes: int = 5) -> None:
        super().__init__()
        self.points = nn.Sequential(
            *(nn.Conv1d(3, width, 1), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Conv1d(width, 2 * width, 1), nn.BatchNorm1d(2 * width), nn.ReLU()),
            *(nn.Conv1d(2 * width, 4 * width, 1), nn.BatchNorm1d(4 * width), nn.ReLU()),
        )
        self.head = nn.Sequential(
            *(nn.Linear(4 * width, width), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Dropout(0.3), nn.Linear(width, classes)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x.transpose(1, 2)).amax(2))


class DeepSets(nn.Module):
    """Zaheer et al., 2017: a function of the sum of what is computed of each element."""

    def __init__(self, values: int = 20, width: int = 24) -> None:
        super().__init__()
        self.element = nn.Sequential(
            *(nn.Embedding(values, width), nn.Linear(width, width), nn.ELU()),
            nn.Linear(width, width),
        )
        self.total = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.total(self.element(x).sum(1))


class GraphLayer(nn.Module):
    """Means over each node's neighbours and itself, a linear layer and an activation."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(inside, outside), nn.ReLU())

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return self.inner(adjacency @ nodes)


class GraphNetwork(nn.Module):
    """Kipf and Welling, 2017, with a dense adjacency; a class for each node."""

    def __init__(self, features: int = 4, width: int = 16, classes: int = 2) -> None:
        super().__init__()
        self.first = GraphLayer(features, width)
        self.second = GraphLayer(width, width)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        nodes = x.shape[1]
        linked, features = x[..., :nodes] + torch.eye(nodes), x[..., nodes:]
        scale = linked.sum(2).rsqrt()
        adjacency = scale[:, :, None] * linked * scale[:, None, :]
        first = self.first(features, adjacency)
        second = self.second(self.dropout(first), adjacency)
        return self.head(torch.cat([first, second], 2)).transpose(1, 2)


class WideAndDeep(nn.Module):
    """Cheng et al., 2016: a linear model and a network with embeddings for codes and numbers."""

    def __init__(self, categories: tuple[int, ...], numbers: int = 5, width: int = 6) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, width) for count in categories)
        self.wide_codes = nn.ModuleList(nn.Embedding(count, 1) for count in categories)
        self.wide_numbers = nn.Linear(numbers, 1)
        self.deep = nn.Sequential(
            *(nn.Linear(width * len(categories) + numbers, 48), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        codes = x[:, : len(self.embeddings)].long().unbind(1)
        numbers = x[:, len(self.embeddings) :]
        embedded = [table(code) for table, code in zip(self.embeddings, codes, strict=True)]
        wide = sum(table(code) for table, code in zip(self.wide_codes, codes, strict=True))
        return self.deep(torch.cat([*embedded, numbers], 1)) + self.wide_numbers(numbers) + wide


class Factorisation(nn.Module):
    """Koren et al., 2009: the product of two embeddings, with biases."""

    def __init__(self, people: int, films: int, width: int = 6) -> None:
        super().__init__()
        self.person, self.film = nn.Embedding(people, width), nn.Embedding(films, width)
        self.person_bias, self.film_bias = nn.Embedding(people, 1), nn.Embedding(films, 1)
        self.bias = nn.Parameter(torch.zeros(()))
        for table in (self.person, self.film, self.person_bias, self.film_bias):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        person, film = x.unbind(1)
        product = (self.person(person) * self.film(film)).sum(1, keepdim=True)
        return product + self.person_bias(person) + self.film_bias(film) + self.bias


def self_normalising(inputs: int = 10, width: int = 32, outputs: int = 3) -> nn.Module:
    """Klambauer et al., 2017."""
    network = nn.Sequential(
        *(nn.Linear(inputs, width), nn.SELU(), nn.AlphaDropout(0.02)),
        *(nn.Linear(width, width), nn.SELU(), nn.AlphaDropout(0.02)),
        *(nn.Linear(width, width), nn.SELU(), nn.Linear(width, outputs)),
    )
    for layer in network:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            nn.init.zeros_(layer.bias)
    return network


QUANTILES = (0.1, 0.5, 0.9)


def pinball(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Quantile loss of outputs ``[N, 3]`` for one target ``[N, 1]``."""
    above = targets - outputs
    shares = torch.tensor(QUANTILES)
    losses = torch.maximum(shares * above, (shares - 1) * above)
    return losses.mean() if reduction == "mean" else losses.sum()


def critic(inputs: int = 6, width: int = 48) -> nn.Module:
    """Layers of spectral norm 1 (Miyato et al., 2018), as in a critic, and a logit."""
    return nn.Sequential(
        *(spectral_norm(nn.Linear(inputs, width)), nn.LeakyReLU(0.2)),
        *(spectral_norm(nn.Linear(width, width)), nn.LeakyReLU(0.2)),
        *(spectral_norm(nn.Linear(width, width)), nn.LeakyReLU(0.2), nn.Linear(width, 1)),
    )


class Policy(nn.Module):
    """Experts that each rate the actions in a context, weighted by a gate."""

    def __init__(self, inputs: int = 6, actions: int = 5, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, actions))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        rated = torch.stack([expert(x) for expert in self.experts], 2)
        return (rated * weights[:, None]).sum(2)


def rewarded(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Policy gradient of logged decisions: each action's log-probability times its reward."""
    taken = F.cross_entropy(outputs, targets[:, 0].long(), reduction="none")
    losses = targets[:, 1] * taken
    return losses.mean() if reduction == "mean" else losses.sum()


class MultiTask(nn.Module):
    """Experts that two tasks share by a gate, and a head for each task (Ma et al., 2018)."""

    def __init__(self, inputs: int = 8, width: int = 24, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(inputs, width), nn.Mish(), nn.Linear(width, width), nn.Mish())
            )
            for _ in range(experts)
        )
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        shared = torch.stack([expert(x) for expert in self.experts], 2) @ weights[..., None]
        return torch.cat([head(shared[..., 0]) for head in self.heads], 1)


def collision_and_distance(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of the first output and Huber loss of the second, of each sample."""
    collides = F.binary_cross_entropy_with_logits(outputs[:, 0], targets[:, 0], reduction="none")
    losses = collides + F.huber_loss(outputs[:, 1], targets[:, 1], reduction="none")
    return losses.mean() if reduction == "mean" else losses.sum()


class Ensemble(nn.Module):
    """Networks that are trained side by side; each gives a mean and a logarithmic variance."""

    def __init__(self, inputs: int = 4, width: int = 16, members: int = 4) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()),
                nn.Linear(width, 2),
            )
            for _ in range(members)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, members, 2]``."""
        return torch.stack([member(x) for member in self.members], 1)


def members_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Gaussian negative log-likelihood of outputs ``[N, members, 2]`` for one target ``[N, 1]``."""
    mean, variance = outputs.unbind(2)
    targets = targets.expand_as(mean)
    return F.gaussian_nll_loss(mean, targets, variance.exp(), full=True, reduction=reduction)
