"""Networks of the development problems, small enough for hundreds of runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(
    *widths: int, activation: Callable[[], nn.Module] = nn.ReLU, norm: bool = False
) -> nn.Module:
    """Linear layers with an activation between them, and layer normalisation before it."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), *([nn.LayerNorm(outer)] if norm else []), activation()]
    return nn.Sequential(*layers[: -2 if norm else -1])


def cnn() -> nn.Module:
    """For images ``[1, 8, 8]``."""
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def normalised_cnn() -> nn.Module:
    """With batch normalisation after each convolution, for images ``[1, 8, 8]``."""
    return nn.Sequential(
        *(nn.Conv2d(1, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(10, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)),
    )


def normalised_signal_cnn() -> nn.Module:
    """With batch normalisation after each convolution, for signals ``[1, 32]``."""
    return nn.Sequential(
        *(nn.Conv1d(1, 8, 5, padding=2, bias=False), nn.BatchNorm1d(8), nn.ReLU()),
        *(nn.Conv1d(8, 12, 5, 2, padding=2, bias=False), nn.BatchNorm1d(12), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(192, 5)),
    )


def signal_cnn() -> nn.Module:
    """For signals ``[1, 32]``, with group normalisation."""
    return nn.Sequential(
        *(nn.Conv1d(1, 12, 5, padding=2), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(12, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(32, 5)),
    )


class Block(nn.Module):
    """A residual block with batch normalisation (He et al., 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, H, W]``."""
        return self.activation(x + self.inner(x))


def resnet(width: int = 10) -> nn.Module:
    """Two blocks for images ``[1, 8, 8]``."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(Block(width), nn.MaxPool2d(2), Block(width)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10)),
    )


class Encoder(nn.Module):
    """PyTorch's transformer layers, and a mean over positions."""

    def __init__(
        self, words: int = 200, length: int = 12, width: int = 24, classes: int = 5
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 3, 48, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T]``."""
        logits: Tensor = self.head(self.encoder(self.embed(x) + self.position).mean(1))
        return logits


class DecoderLayer(nn.Module):
    """Attention to earlier positions and a feed-forward network, normalised before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            *(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        samples, length, width = x.shape
        parts = self.projections(self.before_attention(x)).view(samples, length, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-1, -2) / (width / self.heads) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ values
        x = x + self.merge(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.feed_forward(x)


class LanguageModel(nn.Module):
    """Two decoder layers; gives logits ``[N, classes, T]`` as ``cross_entropy`` takes them."""

    def __init__(self, words: int = 24, length: int = 12, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.Sequential(DecoderLayer(width, 2), DecoderLayer(width, 2))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, words))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T]``."""
        embedded = self.embed(x) + self.position(torch.arange(x.shape[1]))
        logits: Tensor = self.head(self.layers(embedded))
        return logits.transpose(1, 2)


class Recurrent(nn.Module):
    """A recurrent network and a linear layer of its last output."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.recurrent = kind(inputs, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, I]``."""
        outputs, _ = self.recurrent(x)
        logits: Tensor = self.head(outputs[:, -1])
        return logits


class Mixture(nn.Module):
    """Experts whose outputs are weighted by a gate: all of them are used for each sample."""

    def __init__(self, inputs: int, width: int, outputs: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(mlp(inputs, width, outputs) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, I]``."""
        weights = self.gate(x).softmax(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 2)
        return (outputs * weights[:, None, :]).sum(2)


class Words(nn.Module):
    """The mean of the words' embeddings, and a linear layer."""

    def __init__(self, words: int = 200, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T]``."""
        logits: Tensor = self.head(self.embed(x).mean(1))
        return logits
