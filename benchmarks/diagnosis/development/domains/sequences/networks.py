"""Networks for sequences.

Those with an output for each place give ``[N, outputs, T]``, as ``cross_entropy`` takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import Attention, SelfAttention
from benchmarks.diagnosis.development.residual import Residual


def temporal_network(width: int = 12, classes: int = 4) -> nn.Module:
    """Dilated convolutions in residual blocks (Bai et al., 2018), for signals ``[1, T]``."""

    def block(dilation: int) -> nn.Module:
        return Residual(
            nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation),
            *(nn.ReLU(), nn.Dropout(0.05)),
            nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation),
        )

    return nn.Sequential(
        *(nn.Conv1d(1, width, 5, padding=2), *(block(2**k) for k in range(4)), nn.ReLU()),
        *(nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(width, classes)),
    )


def causal_bias(length: int) -> Tensor:
    """Minus infinity for later places, ``[length, length]``."""
    return torch.full((length, length), float("-inf")).triu(1)


def feed_forward(width: int, activation: nn.Module) -> nn.Module:
    """A hidden layer behind a normalisation, in a residual connection."""
    return Residual(
        *(nn.LayerNorm(width), nn.Linear(width, 2 * width), activation),
        nn.Linear(2 * width, width),
    )


class DecoderBlock(nn.Module):
    """Attention to earlier places, then to what has been read (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend = Attention(width, heads)
        self.cross_attend = Attention(width, heads)
        self.feed_forward = feed_forward(width, nn.GELU())

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attend(normed, normed, causal_bias(x.shape[1]))
        x = x + self.cross_attend(self.norms[1](x), read)
        return self.feed_forward(x)


class Translator(nn.Module):
    """An encoder for the first ``read`` tokens and a decoder for the others."""

    def __init__(self, tokens: int, length: int, read: int, width: int = 24) -> None:
        super().__init__()
        self.read = read
        self.embed = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.3 * torch.randn(length, width))
        self.encoder = nn.Sequential(
            Residual(nn.LayerNorm(width), SelfAttention(width, 4)),
            *(feed_forward(width, nn.GELU()), nn.LayerNorm(width)),
        )
        self.decoder = nn.ModuleList(DecoderBlock(width, 4) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, tokens))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embed(x) + self.position
        read, known = self.encoder(embedded[:, : self.read]), embedded[:, self.read :]
        for block in self.decoder:
            known = block(known, read)
        return self.head(known).transpose(1, 2)


class SquaredReLU(nn.Module):
    """The square of what a rectified linear unit gives (So et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.rectify = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.rectify(x).square()


def distance_bias(heads: int, length: int) -> Tensor:
    """Causal scores that fall with the distance, each head's more slowly (Press et al., 2022)."""
    places = torch.arange(length)
    slopes = 2.0 ** -(8 / heads * torch.arange(1, heads + 1))
    return causal_bias(length) - slopes[:, None, None] * (places[:, None] - places)


class LinearBiasDecoder(nn.Module):
    """A language model with scores that fall with the distance, and with the embedding as head."""

    def __init__(self, tokens: int = 7, width: int = 24, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(tokens, width)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.feed_forward = nn.ModuleList(feed_forward(width, SquaredReLU()) for _ in range(layers))
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        bias, x = distance_bias(self.heads, x.shape[1]), self.embed(x)
        layers = zip(self.norms, self.attention, self.feed_forward, strict=True)
        for norm, attention, feed_forward_layer in layers:
            normed = norm(x)
            x = feed_forward_layer(x + attention(normed, normed, bias))
        return self.head(self.last_norm(x)).transpose(1, 2)


class PooledLSTM(nn.Module):
    """A recurrent network in both directions whose outputs are weighted (Yang et al., 2016)."""

    def __init__(self, words: int = 60, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.recurrent = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.score = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, 1))
        self.head = nn.Linear(2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.recurrent(self.embed(x))
        weights = self.score(outputs).softmax(1)
        return self.head((weights * outputs).sum(1))


class MinimalRecurrence(nn.Module):
    """A gate that depends on the inputs alone mixes these into the state (Feng et al., 2024)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.update = nn.Sequential(nn.Linear(inputs, width), nn.Sigmoid())
        self.candidate = nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        shares, candidates = self.update(x), self.candidate(x)
        state, states = torch.zeros_like(candidates[:, 0]), []
        for share, candidate in zip(shares.unbind(1), candidates.unbind(1), strict=True):
            state = state + share * (candidate - state)
            states.append(state)
        return torch.stack(states, 1)


class Forecaster(nn.Module):
    """Two minimal recurrences, and all future values from the last state."""

    def __init__(self, inputs: int = 3, width: int = 32, future: int = 6) -> None:
        super().__init__()
        self.recurrent = nn.Sequential(
            *(MinimalRecurrence(inputs, width), nn.Linear(width, width), nn.Hardswish()),
            MinimalRecurrence(width, width),
        )
        self.head = nn.Sequential(
            *(nn.LayerNorm(width), nn.Linear(width, width), nn.Hardswish()),
            nn.Linear(width, future),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[:, -1])


class SoundClassifier(nn.Module):
    """Convolutions of a spectrogram, and a recurrent network along the time (Choi et al., 2017)."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.spectral = nn.Sequential(
            *(nn.Conv2d(1, width, 3, (2, 1), 1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, (2, 1), 1), nn.BatchNorm2d(width), nn.ReLU()),
            nn.MaxPool2d((2, 1)),
        )
        self.recurrent = nn.GRU(4 * width, 16, batch_first=True)
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.spectral(x).flatten(1, 2).transpose(1, 2)
        outputs, _ = self.recurrent(frames)
        return self.head(outputs[:, -1])
