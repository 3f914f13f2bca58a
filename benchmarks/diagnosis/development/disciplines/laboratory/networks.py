"""Networks for laboratories."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.attention import SelfAttention
from benchmarks.diagnosis.development.disciplines.laboratory import data
from benchmarks.diagnosis.development.residual import Residual


class MotifNetwork(nn.Module):
    """Motifs by convolutions, and what stands near which by a memory (Quang and Xie, 2016)."""

    def __init__(self, width: int = 32, size: int = 16, kinds: int = 4) -> None:
        super().__init__()
        self.motifs = nn.Sequential(
            *(nn.Conv1d(4, width, 8, padding=4), nn.ReLU(), nn.MaxPool1d(6), nn.Dropout(0.1)),
        )
        self.memory = nn.LSTM(width, size, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(
            *(nn.Flatten(), nn.Linear(16 * size, 48), nn.ReLU(), nn.Linear(48, kinds)),
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.memory(self.motifs(x).transpose(1, 2))
        return self.head(outputs)


class Transposed(nn.Module):
    """Layers for channels ``[N, C, T]``, used for sequences ``[N, T, C]``."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.transpose(1, 2)).transpose(1, 2)


class Half(nn.Module):
    """Half of what a layer computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def conformer_layer(width: int) -> nn.Module:
    """Attention and convolutions between two halves of linear layers (Gulati et al., 2020)."""

    def linear() -> nn.Module:
        return Residual(
            *(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Dropout(0.05)),
            *(nn.Linear(2 * width, width), Half()),
        )

    nearby = Transposed(
        *(nn.Conv1d(width, 2 * width, 1), nn.GLU(1)),
        nn.Conv1d(width, width, 5, padding=2, groups=width),
        *(nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, width, 1)),
    )
    return nn.Sequential(
        *(linear(), Residual(nn.LayerNorm(width), SelfAttention(width, 4))),
        *(Residual(nn.LayerNorm(width), nearby), linear(), nn.LayerNorm(width)),
    )


class Conformer(nn.Module):
    """A class for each residue, ``[N, 3, T]``."""

    def __init__(self, width: int = 24, classes: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Embedding(data.RESIDUES, width), conformer_layer(width)),
            nn.Linear(width, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).transpose(1, 2)


class TensorNetwork(nn.Module):
    """Bilinear and linear functions of a pair (Socher et al., 2013)."""

    def __init__(self, descriptors: int = 6, width: int = 24) -> None:
        super().__init__()
        self.pair = nn.Bilinear(descriptors, descriptors, width)
        self.each = nn.Linear(2 * descriptors, width, bias=False)
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.unbind(1)
        return self.head(self.pair(first, second) + self.each(x.flatten(1)))


class Squeezed(nn.Module):
    """Each channel times a number between 0 and 1 that depends on all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.Sequential(
            *(nn.AdaptiveAvgPool1d(1), nn.Conv1d(width, width // 4, 1), nn.SiLU()),
            *(nn.Conv1d(width // 4, width, 1), nn.Sigmoid()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights(x)


class IsotopeNetwork(nn.Module):
    """Two heads behind blocks in the manner of Tan and Le, 2019."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv1d(1, width, 3, padding=1, bias=False), nn.BatchNorm1d(width), nn.SiLU()),
            *(self._block(width), self._block(width)),
            *(nn.Conv1d(width, 3 * width, 1), nn.SiLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten()),
            nn.LayerNorm(3 * width),
        )
        self.chlorine = nn.Linear(3 * width, data.CHLORINE)
        self.bromine = nn.Linear(3 * width, data.BROMINE)

    @staticmethod
    def _block(width: int) -> nn.Module:
        inside = 2 * width
        return Residual(
            *(nn.Conv1d(width, inside, 1, bias=False), nn.BatchNorm1d(inside), nn.SiLU()),
            nn.Conv1d(inside, inside, 5, padding=2, groups=inside, bias=False),
            *(nn.BatchNorm1d(inside), nn.SiLU(), Squeezed(inside)),
            *(nn.Conv1d(inside, width, 1, bias=False), nn.BatchNorm1d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        seen = self.body(x)
        return torch.cat([self.chlorine(seen), self.bromine(seen)], 1)


class TwinNetwork(nn.Module):
    """The same layers for both views (Zbontar et al., 2021)."""

    def __init__(self, points: int = 48, width: int = 64, size: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Linear(points, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()),
        )
        self.projector = nn.Linear(width, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(self.encoder(x.flatten(0, 1))).unflatten(0, (-1, 2))


class ConvexLayer(nn.Module):
    """Weights of what is convex are positive, and those of the inputs are any."""

    def __init__(self, inside: int, outside: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outside, inside) * 0.3 - 3)
        self.straight = nn.Linear(inputs, outside)

    def forward(self, convex: Tensor, inputs: Tensor) -> Tensor:
        return F.linear(convex, F.softplus(self.weight)) + self.straight(inputs)


class ConvexNetwork(nn.Module):
    """A convex function of the inputs (Amos et al., 2017)."""

    def __init__(self, inputs: int = 4, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.second, self.third = ConvexLayer(width, width, inputs), ConvexLayer(width, 1, inputs)
        self.activations = nn.ModuleList(nn.Softplus(3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = self.activations[0](self.first(x))
        return self.third(self.activations[1](self.second(first, x)), x)
