"""Networks of the development problems that are for sequences.

Those with an output for each place give ``[N, outputs, T]``, as ``cross_entropy`` takes them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.nn.utils.parametrizations import weight_norm


class Tagger(nn.Module):
    """A recurrent network that reads in both directions, with a class for each word."""

    def __init__(self, words: int = 40, width: int = 16, tags: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.dropout = nn.Dropout(0.2)
        self.recurrent = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.recurrent(self.dropout(self.embed(x)))
        return self.head(self.dropout(outputs)).transpose(1, 2)


class Earlier(nn.Module):
    """Pads sequences ``[N, C, T]`` at their start, so that a convolution sees the past alone."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (self.places, 0))


class GatedBlock(nn.Module):
    """A causal convolution whose one half gates the other, added to its inputs."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(Earlier(kernel - 1), weight_norm(nn.Conv1d(width, 2 * width, kernel)), nn.GLU(1))
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class GatedLanguageModel(nn.Module):
    """Dauphin et al., 2017: a language model of gated convolutions."""

    def __init__(self, characters: int, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.blocks = nn.Sequential(*(GatedBlock(width, 4) for _ in range(3)))
        self.head = nn.Conv1d(width, characters, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x).transpose(1, 2)))


def rotated(x: Tensor) -> Tensor:
    """Turns pairs of channels of ``[..., T, D]`` by angles that grow with the place."""
    length, width = x.shape[-2:]
    frequencies = 100.0 ** (-torch.arange(width // 2) / (width // 2))
    angles = torch.arange(length)[:, None] * frequencies
    first, second = x.chunk(2, -1)
    turned = (
        first * angles.cos() - second * angles.sin(),
        first * angles.sin() + second * angles.cos(),
    )
    return torch.cat(turned, -1)


class RotaryAttention(nn.Module):
    """Causal attention with rotated queries and keys (Su et al., 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.projections(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts
        mixed = F.scaled_dot_product_attention(
            rotated(queries), rotated(keys), values, is_causal=True
        )
        return self.merge(mixed.transpose(1, 2).flatten(2))


class SwishGated(nn.Module):
    """A feed-forward network in which one projection gates another (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_projection = nn.Sequential(nn.Linear(width, inner, bias=False), nn.SiLU())
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate_projection(x) * self.up(x))


class LlamaLayer(nn.Module):
    """Attention and a gated network, each behind a normalisation by the root mean square."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.RMSNorm(width), RotaryAttention(width, heads))
        self.feed_forward = nn.Sequential(nn.RMSNorm(width), SwishGated(width, 2 * width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.feed_forward(x)


class Llama(nn.Module):
    """Touvron et al., 2023, with two layers and with the embedding's weight in the head."""

    def __init__(self, tokens: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.layers = nn.Sequential(LlamaLayer(width, 4), LlamaLayer(width, 4), nn.RMSNorm(width))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x))).transpose(1, 2)


class WaveBlock(nn.Module):
    """A dilated causal convolution with gated tanh units; gives its outputs and those to skip."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        convolution = partial(nn.Conv1d, width, width, 2, dilation=dilation)
        self.filter = nn.Sequential(Earlier(dilation), convolution(), nn.Tanh())
        self.gate_filter = nn.Sequential(Earlier(dilation), convolution(), nn.Sigmoid())
        self.merge = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        merged = self.merge(self.filter(x) * self.gate_filter(x))
        return x + merged, merged


class WaveNet(nn.Module):
    """Van den Oord et al., 2016, for series ``[1, T]``."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.blocks = nn.ModuleList(WaveBlock(width, 2**k) for k in range(5))
        self.head = nn.Sequential(
            *(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 1, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), torch.zeros(())
        for block in self.blocks:
            x, skipped = block(x)
            total = total + skipped
        return self.head(total)


def event_detector(width: int = 12, kinds: int = 5) -> nn.Module:
    """Strided convolutions with normed weights for recordings ``[1, 96]``; any event anywhere."""

    def convolution(inside: int, outside: int) -> tuple[nn.Module, ...]:
        return weight_norm(nn.Conv1d(inside, outside, 7, 2, 3)), nn.LeakyReLU(0.1)

    return nn.Sequential(
        *(*convolution(1, width), *convolution(width, 2 * width), *convolution(2 * width, 24)),
        *(nn.AdaptiveMaxPool1d(1), nn.Flatten(), weight_norm(nn.Linear(24, kinds))),
    )


class Highway(nn.Module):
    """Mixes what a layer gives with what it was given (Srivastava et al., 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        carrying = nn.Linear(width, width)
        nn.init.constant_(carrying.bias, 1.0)
        self.carry = nn.Sequential(carrying, nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        carried = self.carry(x)
        return carried * x + (1 - carried) * self.change(x)


class CharacterCnn(nn.Module):
    """Convolutions of several widths, their maxima, and highway layers (Kim et al., 2016)."""

    def __init__(self, letters: int = 6, width: int = 12, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, 16, size), nn.Tanh(), nn.AdaptiveMaxPool1d(1))
            for size in (2, 3, 5)
        )
        self.head = nn.Sequential(
            *(nn.Flatten(), Highway(48), Highway(48), nn.Dropout(0.3), nn.Linear(48, classes))
        )

    def forward(self, x: Tensor) -> Tensor:
        letters = self.embed(x).transpose(1, 2)
        return self.head(torch.cat([size(letters) for size in self.filters], 1))


class DifferentialEquation(nn.Module):
    """Integrates a derivative that is a network by Heun's method (Chen et al., 2018)."""

    def __init__(self, states: int = 2, width: int = 32, times: int = 12) -> None:
        super().__init__()
        self.times = times
        self.derivative = nn.Sequential(
            *(nn.Linear(states, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus()),
            nn.Linear(width, states),
        )

    def forward(self, x: Tensor) -> Tensor:
        path, duration = [], 0.2
        for _ in range(self.times):
            slope = self.derivative(x)
            x = x + duration * (slope + self.derivative(x + duration * slope)) / 2
            path.append(x)
        return torch.stack(path, 1)
