"""Networks for text.

Those with an output for each place give ``[N, outputs, T]``, as ``cross_entropy`` takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.attention import Attention
from benchmarks.diagnosis.development.residual import Residual
from benchmarks.diagnosis.development.trades.writing import data


class RelativeBias(nn.Module):
    """A number for each head and each distance, up to a largest one (Raffel et al., 2020)."""

    def __init__(self, heads: int, largest: int, is_causal: bool) -> None:
        super().__init__()
        self.largest, self.is_causal = largest, is_causal
        self.table = nn.Embedding(2 * largest + 1, heads)

    def forward(self, length: int) -> Tensor:
        """``[heads, length, length]``, minus infinity for what comes later if causal."""
        place = torch.arange(length)
        distance = place - place[:, None]
        bias = self.table(distance.clamp(-self.largest, self.largest) + self.largest)
        later = (distance > 0) if self.is_causal else torch.zeros(length, length, dtype=torch.bool)
        return bias.permute(2, 0, 1).masked_fill(later, -torch.inf)


def gated_feed_forward(width: int) -> nn.Module:
    """Linear layers and a GELU behind a normalisation, added to the inputs."""
    return Residual(
        *(nn.RMSNorm(width), nn.Linear(width, 2 * width, bias=False), nn.GELU()),
        nn.Linear(2 * width, width, bias=False),
    )


class TextToText(nn.Module):
    """One layer reads and one writes, with relative places (Raffel et al., 2020).

    The inputs are what is read and, behind it, what is known of what is to be written.
    """

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(data.BEGIN + 1, width)
        self.reading = RelativeBias(heads, data.LENGTH, is_causal=False)
        self.writing = RelativeBias(heads, data.LENGTH, is_causal=True)
        self.across = RelativeBias(heads, data.LENGTH, is_causal=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(4))
        self.attentions = nn.ModuleList(Attention(width, heads) for _ in range(3))
        self.read = gated_feed_forward(width)
        self.written = gated_feed_forward(width)
        self.head = nn.Linear(width, data.LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        read, written = self.embed(x).chunk(2, 1)
        length = data.LENGTH
        seen = self.norms[0](read)
        read = self.read(read + self.attentions[0](seen, seen, self.reading(length)))
        known = self.norms[1](written)
        written = written + self.attentions[1](known, known, self.writing(length))
        context, question = self.norms[2](read), self.norms[3](written)
        written = written + self.attentions[2](question, context, self.across(length))
        return self.head(self.written(written)).transpose(1, 2)


class TimeMix(nn.Module):
    """A mean of earlier values, which count less the earlier they are (Peng et al., 2023)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.full((width,), 0.5))
        self.fade = nn.Parameter(torch.linspace(-3, 1, width))
        self.bonus = nn.Parameter(torch.zeros(width))
        self.projections = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = nn.functional.pad(x, (0, 0, 1, -1))
        mixed = self.mixed * x + (1 - self.mixed) * before
        key, value, gate = self.projections(mixed).float().chunk(3, 2)
        place = torch.arange(x.shape[1])
        age = (place[:, None] - place - 1)[..., None]
        weights = (-self.fade.exp() * age.clamp(min=0)).masked_fill(age < 0, -torch.inf)
        weights = torch.where(age == -1, self.bonus, weights)
        shares = (weights + key[:, None]).softmax(2)
        return self.merge((shares * value[:, None]).sum(2) * gate.sigmoid())


class SquaredLinear(nn.Module):
    """The channels' part of a layer: what is positive is squared."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.grow, self.shrink = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.shrink(self.activation(self.grow(x)).square())


class ReceptanceModel(nn.Module):
    """Peng et al., 2023 (RWKV), with two layers."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            nn.Embedding(data.STEPS + data.DISHES, width), nn.LayerNorm(width)
        )
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    Residual(nn.LayerNorm(width), TimeMix(width)),
                    Residual(nn.LayerNorm(width), SquaredLinear(width)),
                )
                for _ in range(layers)
            )
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, data.STEPS))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x))).transpose(1, 2)


class SelectiveLayer(nn.Module):
    """A linear recurrence whose steps, inputs and outputs depend on the text (Gu and Dao, 2023)."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        self.states = states
        self.enter = nn.Linear(width, 2 * width)
        self.nearby = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.activation = nn.SiLU()
        self.select = nn.Linear(width, width + 2 * states)
        self.fade = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = self.enter(x).chunk(2, 2)
        near = self.nearby(signal.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        signal = self.activation(near)
        step, write, read = (
            self.select(signal).float().tensor_split([x.shape[2], x.shape[2] + self.states], 2)
        )
        step = nn.functional.softplus(step - 1)
        kept = (-self.fade.exp() * step[..., None]).exp()
        added = (step * signal)[..., None] * write[:, :, None]
        state, outputs = torch.zeros_like(added[:, 0]), []
        for time in range(x.shape[1]):
            state = kept[:, time] * state + added[:, time]
            outputs.append((state * read[:, time, None]).sum(2))
        mixed = torch.stack(outputs, 1) + self.skip * signal
        return self.leave(mixed * nn.functional.silu(gate))


class SelectiveModel(nn.Module):
    """Two layers of Gu and Dao, 2023 (Mamba)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(data.SYMBOLS + 1, width)
        self.layers = nn.Sequential(
            *(Residual(nn.RMSNorm(width), SelectiveLayer(width)) for _ in range(2))
        )
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, data.SYMBOLS + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x))).transpose(1, 2)


class DualEncoder(nn.Module):
    """Cosines of a question and of answers (Karpukhin et al., 2020), ``[N, ANSWERS]``."""

    def __init__(self, width: int = 24, size: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * data.THINGS, width)
        self.question, self.answer = (
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, size))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        question, answers = self.embed(x).tensor_split([1], 1)
        asked, answered = self.question(question).mean(2), self.answer(answers).mean(2)
        return nn.functional.cosine_similarity(asked, answered, 2)


class SkipGram(nn.Module):
    """Products of a word's vector and the vectors of others (Mikolov et al., 2013)."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.words, self.near = nn.Embedding(data.WALKED, size), nn.Embedding(data.WALKED, size)
        self.offset = nn.Parameter(torch.zeros(1))
        for table in (self.words, self.near):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        word, others = self.words(x[:, :1]), self.near(x[:, 1:])
        return (word * others).sum(2) + self.offset


class SpanReader(nn.Module):
    """Scores of where an answer starts and where it ends, ``[N, T, 2]`` (Seo et al., 2017)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(data.PLAIN + 1 + data.KEYS, width)
        self.first = nn.GRU(2 * width, width, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        key, text = self.embed(x).tensor_split([1], 1)
        outputs, _ = self.first(torch.cat([text, text * key], 2))
        return self.head(outputs)


class PostMixture(nn.Module):
    """Words' values by experts, which a gate weights by what a post starts with."""

    def __init__(self, width: int = 24, experts: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(data.VOCABULARY + data.DOMAINS, width)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, outputs))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        about, words = self.embed(x).tensor_split([1], 1)
        weights = self.gate(about[:, 0]).softmax(1)
        values = torch.stack([expert(words).sum(1) for expert in self.experts], 1)
        return (weights[..., None] * values).sum(1)
