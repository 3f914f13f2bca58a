"""Networks for text.

Those with an output for each place give ``[N, outputs, T]``, as ``cross_entropy`` takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import SelfAttention
from benchmarks.diagnosis.development.fields.language import data
from benchmarks.diagnosis.development.residual import Residual


class CharacterLSTM(nn.Module):
    """Two recurrent layers with dropout between them, and the next character (Graves, 2013)."""

    def __init__(self, characters: int, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, 16)
        self.recurrent = nn.LSTM(16, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.recurrent(self.embed(x))
        return self.head(outputs).transpose(1, 2)


class AttentiveTranslator(nn.Module):
    """A recurrent network writes, and attends to what another has read (Bahdanau et al., 2015).

    The inputs are what is read and, behind it, what is known of what is to be written.
    """

    def __init__(self, tokens: int, read: int, width: int = 32, outputs: int = 10) -> None:
        super().__init__()
        self.read = read
        self.embed = nn.Embedding(tokens, 16)
        self.reader = nn.GRU(16, width // 2, batch_first=True, bidirectional=True)
        self.keys = nn.Linear(width, width, bias=False)
        self.query = nn.Linear(width, width)
        self.score = nn.Sequential(nn.Tanh(), nn.Linear(width, 1, bias=False))
        self.writer = nn.GRUCell(16 + width, width)
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embed(x)
        memory, last = self.reader(embedded[:, : self.read])
        keys, state, logits = self.keys(memory), last.transpose(0, 1).flatten(1), []
        for known in embedded[:, self.read :].unbind(1):
            weights = self.score(keys + self.query(state)[:, None]).softmax(1)
            found = (weights * memory).sum(1)
            state = self.writer(torch.cat([known, found], 1), state)
            logits.append(self.head(torch.cat([state, found], 1)))
        return torch.stack(logits, 2)


class FieldTagger(nn.Module):
    """Dilated convolutions (Strubell et al., 2017) score the tags of a conditional random field."""

    def __init__(self, words: int, width: int = 24, tags: int = 1 + 2 * data.KINDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.Sequential(
            *(nn.Conv1d(width, width, 3, padding=1), nn.ReLU()),
            *(nn.Conv1d(width, width, 3, padding=2, dilation=2), nn.ReLU()),
            nn.Conv1d(width, tags, 1),
        )
        self.follows = nn.Parameter(torch.zeros(tags, tags))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layers(self.embed(x).transpose(1, 2)).transpose(1, 2)
        return torch.cat([scores, self.follows.expand(len(x), -1, -1).to(scores.dtype)], 1)


class ExpertLayer(nn.Module):
    """Feed-forward networks of which a gate weights the outputs at each place."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(2)
        outputs = torch.stack([expert(x) for expert in self.experts], 3)
        return (outputs * weights[..., None, :]).sum(3)


class MaskedLanguageModel(nn.Module):
    """Predicts what is hidden (Devlin et al., 2019), with experts behind the attention."""

    def __init__(self, tokens: int, length: int = 16, width: int = 32, experts: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens + 1, width)
        self.position = nn.Parameter(0.5 * torch.randn(length, width))
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    *(Residual(SelfAttention(width, 4)), nn.LayerNorm(width)),
                    *(Residual(ExpertLayer(width, experts)), nn.LayerNorm(width)),
                )
                for _ in range(2)
            )
        )
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x) + self.position)).transpose(1, 2)


class Retention(nn.Module):
    """Sums over earlier places with weights that fall with the distance (Sun et al., 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.Linear(width, 3 * width, bias=False)
        self.gated = nn.Sequential(nn.Linear(width, width, bias=False), nn.SiLU())
        self.norm = nn.GroupNorm(heads, width)
        self.merge = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.projections(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts
        scores = queries @ keys.transpose(2, 3) / keys.shape[3] ** 0.5
        mixed = (scores * self._decay(x.shape[1]).to(scores.dtype)) @ values
        normed = self.norm(mixed.transpose(1, 2).flatten(2).flatten(0, 1)).view_as(x)
        return self.merge(self.gated(x) * normed)

    def _decay(self, length: int) -> Tensor:
        """Powers of a number below 1 of each head, ``[heads, T, T]``."""
        places = torch.arange(length)
        distance = places[:, None] - places
        kept = 1 - 2.0 ** -(2 + torch.arange(self.heads))
        return torch.where(distance >= 0, kept[:, None, None] ** distance.clamp(min=0), 0.0)


class RetentiveNetwork(nn.Module):
    """Sun et al., 2023, with a class for a text."""

    def __init__(self, letters: int, width: int = 24, classes: int = data.LANGUAGES) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    Residual(nn.LayerNorm(width), Retention(width, 3)),
                    Residual(
                        *(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()),
                        nn.Linear(2 * width, width),
                    ),
                )
                for _ in range(2)
            )
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))
