"""Networks of sequences: recurrent ones, attention in many forms, convolutions and filters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, elu, one_hot, scaled_dot_product_attention
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from benchmarks.zoo.by_hand_rows import Build, linear, parameter, parted
from benchmarks.zoo.losses import (
    CLASSES,
    WORDS,
    classify,
    label_tokens,
    label_tokens_first,
    labelled_words,
    numbers,
    words,
)
from benchmarks.zoo.network import Batch, Network, also_told, labelled
from tests.cases.row_cases import Net

KIND = "by hand: sequences"
D = 6
H = 8


class Recurrent(nn.Module):
    """A recurrent layer over ``[N, T, D]``, or over ``[T, N, D]``, and its mean over time."""

    def __init__(self, layer: Callable[..., nn.RNNBase], first: bool, **options: object) -> None:
        super().__init__()
        self.first = first
        self.layer = layer(D, H, batch_first=first, **options)
        width = self.layer.proj_size or H
        self.head = nn.Linear(width * (2 if self.layer.bidirectional else 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The head is called on all times."""
        output, _ = self.layer(x if self.first else x.transpose(0, 1))
        return self.head(output).mean(1 if self.first else 0)


class Packed(nn.Module):
    """A recurrent layer on packed sequences; only the last state of each is used, or all."""

    def __init__(self, layer: Callable[..., nn.RNNBase], padded: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, D)
        self.layer = layer(D, H, batch_first=True)
        self.head = nn.Linear(H, CLASSES)
        self.padded = padded

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """``[N, T]`` and ``[N]``."""
        packed = pack_padded_sequence(
            self.table(x), lengths, batch_first=True, enforce_sorted=False
        )
        output, state = self.layer(packed)
        if self.padded:
            return self.head(pad_packed_sequence(output, batch_first=True)[0].sum(1))
        return self.head((state[0] if isinstance(state, tuple) else state)[0])


def packed_in_front(model: Net, x: list[Tensor]) -> Tensor:
    """A layer in front of the recurrent one is called on the packed rows ``[Tₙ, D]``."""
    packed = pack_sequence(x, enforce_sorted=False)
    packed = packed._replace(data=model.inside(packed.data).tanh())
    return model.head(model.layer(packed)[1][0])


def lengths_batch(samples: int, length: int) -> Batch:
    """Texts of different lengths."""
    lengths = torch.randint(1, length + 1, (samples,))
    return {**words(samples, length)(), "lengths": lengths}


def list_batch(samples: int, length: int) -> Batch:
    """A list of sequences of different lengths."""
    sizes = torch.randint(1, length + 1, (samples,)).tolist()
    x = [torch.randn(size, D, dtype=torch.float64) for size in sizes]
    return {"x": x, "y": torch.randint(CLASSES, (samples,))}


def packed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of packed sequences."""
    return cross_entropy(model(batch["x"], batch["lengths"]), batch["y"])


class Cells(nn.Module):
    """A loop over time with a cell, whose states are stacked times first."""

    def __init__(self, cell: Callable[[int, int], nn.RNNCellBase], learned: bool = False) -> None:
        super().__init__()
        self.cell = cell(D, H)
        self.initial = nn.Parameter(torch.randn(1, H)) if learned else None
        self.head = nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        zero = x.new_zeros(len(x), H)
        start = zero if self.initial is None else self.initial.expand(len(x), H)
        state = (start, zero) if isinstance(self.cell, nn.LSTMCell) else start
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(outputs, 0)).mean(0)


def gated_by_hand(model: Net, x: Tensor) -> Tensor:
    """A gated loop of two linear layers that are called at each time."""
    state = x.new_zeros(len(x), H)
    for step in x.unbind(1):
        both = torch.cat([step, state], 1)
        gate = model.gate(both).sigmoid()
        state = gate * state + (1 - gate) * model.new(both).tanh()
    return model.head(state)


def translate(model: Net, x: Tensor) -> Tensor:
    """An encoder's states, a decoder with teacher forcing, and attention between them.

    The words to come are those that came in.
    """
    states, last = model.encoder(model.source(x))
    output, _ = model.decoder(model.target(x), last)
    attended = (model.score(output) @ states.transpose(1, 2)).softmax(-1) @ states
    return model.head(torch.cat([output, attended], -1))


class Attention(nn.Module):
    """Attention by hand: one projection for queries, keys and values, and a causal mask."""

    def __init__(self, fused: bool = False, groups: int = 2) -> None:
        super().__init__()
        self.fused, self.groups = fused, groups
        self.query, self.both = nn.Linear(D, 8), nn.Linear(D, 2 * 4 * groups)
        self.out = nn.Linear(8, D)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        n, t, _ = x.shape
        query = self.query(x).view(n, t, 2, 4).transpose(1, 2)
        key, value = self.both(x).view(n, t, 2, self.groups, 4).permute(2, 0, 3, 1, 4)
        key, value = (z.repeat_interleave(2 // self.groups, 1) for z in (key, value))
        if self.fused:
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-1, -2) / 2
            hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(n, t, 8))


class Language(nn.Module):
    """Words in, words out: an embedding, position embeddings, a layer with a residual, a head."""

    def __init__(self, layer: nn.Module, tied: bool = False, positions: str = "table") -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, D)
        self.positions: nn.Module | nn.Parameter | None = None
        if positions == "table":
            self.positions = nn.Embedding(12, D)
        elif positions == "parameter":
            self.positions = nn.Parameter(torch.randn(12, D))
        self.layer, self.norm = layer, nn.LayerNorm(D)
        self.head = nn.Linear(D, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T]``."""
        hidden = self.table(x)
        if isinstance(self.positions, nn.Embedding):
            hidden = hidden + self.positions(torch.arange(x.shape[1]))
        elif self.positions is not None:
            hidden = hidden + self.positions[: x.shape[1]]
        return self.head(self.norm(hidden + self.layer(hidden)))


def language_first(model: Net, x: Tensor) -> Tensor:
    """Words ``[T, N]`` in, words out, with positions in front of samples all the way."""
    hidden, _ = model.layer(model.table(x))
    mixed, _ = model.attention(hidden, hidden, hidden, need_weights=False)
    return model.head(hidden + mixed)


def words_first(samples: int, length: int) -> Callable[[], Batch]:
    """Words and labels ``[T, N]``."""
    of = labelled_words(samples, length)
    return lambda: {key: value.T.contiguous() for key, value in of().items()}


def biased(model: Net, x: Tensor) -> Tensor:
    """Attention with a table of relative positions, which is a layer or a parameter."""
    n, t, _ = x.shape
    query, key, value = model.mix(x).view(n, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
    places = torch.arange(t)
    distance = places[:, None] - places + 11
    table = model.bias(distance) if isinstance(model.bias, nn.Module) else model.bias[distance]
    scores = query @ key.transpose(-1, -2) + table.permute(2, 0, 1)
    return model.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(n, t, 8))


def rotated(model: Net, x: Tensor) -> Tensor:
    """By learned frequencies."""
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * model.frequencies
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def rotary(model: Net, x: Tensor) -> Tensor:
    """Attention whose queries and keys are rotated."""
    scores = rotated(model, model.query(x)) @ rotated(model, model.key(x)).transpose(1, 2)
    return scores.softmax(-1) @ model.value(x)


def linear_attention(model: Net, x: Tensor) -> Tensor:
    """Attention without a softmax, by einsum."""
    query, key = elu(model.query(x)) + 1, elu(model.key(x)) + 1
    state = torch.einsum("ntd,nte->nde", key, model.value(x))
    size = torch.einsum("ntd,nsd->nt", query, key)
    return torch.einsum("ntd,nde->nte", query, state) / size[..., None]


def windowed(model: Net, x: Tensor) -> Tensor:
    """Attention inside of sliding windows that ``unfold`` cuts out."""
    padded = nn.functional.pad(model.both(x), (0, 0, 1, 1))
    key, value = padded.unfold(1, 3, 1).chunk(2, 2)
    scores = torch.einsum("ntd,ntdw->ntw", model.query(x), key)
    return torch.einsum("ntw,ntdw->ntd", scores.softmax(-1), value)


def perceive(model: Net, x: Tensor) -> Tensor:
    """Latents that all samples share look at the inputs (Perceiver)."""
    latents = model.latents.expand(len(x), -1, -1)
    return model.head(model.attention(latents, x, x)[0].mean(1))


def fourier(model: Net, x: Tensor) -> Tensor:
    """Mixing by a Fourier transform over time and features (FNet)."""
    return model.net(x + torch.fft.fft2(x).real)


def filtered(model: Net, x: Tensor) -> Tensor:
    """A learned filter of complex numbers in Fourier space."""
    weight = torch.view_as_complex(model.weight)
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * weight, n=x.shape[1], dim=1)


def mixer(model: Net, x: Tensor) -> Tensor:
    """Layers over time and over features in turns."""
    x = x + model.times(x.transpose(1, 2)).transpose(1, 2).tanh()
    return x + model.features(x).tanh()


def state_space(model: Net, x: Tensor) -> Tensor:
    """A diagonal linear recurrence, step by step, whose steps depend on the inputs (Mamba)."""
    step = nn.functional.softplus(model.step(x))[..., None]
    inside, outside = model.both(x).chunk(2, -1)
    decay, inputs = (-step * model.rate.exp()).exp(), step * inside[:, :, None] * x[..., None]
    state, outputs = x.new_zeros(len(x), D, 3), []
    for time in range(x.shape[1]):
        state = decay[:, time] * state + inputs[:, time]
        outputs.append((state * outside[:, time, None]).sum(-1))
    return torch.stack(outputs, 1) + model.skip * x


def long_convolution(model: Net, x: Tensor) -> Tensor:
    """A convolution as long as the sequence, by Fourier transforms of a generated kernel."""
    t = x.shape[1]
    times = torch.arange(t, dtype=x.dtype)[:, None]
    kernel = model.amplitude * (-model.decay * times).exp()
    product = torch.fft.rfft(x, n=2 * t, dim=1) * torch.fft.rfft(kernel, n=2 * t, dim=0)
    return torch.fft.irfft(product, n=2 * t, dim=1)[:, :t]


def causal(model: Net, x: Tensor) -> Tensor:
    """Dilated causal convolutions with gates (WaveNet)."""
    hidden = x.transpose(1, 2)
    for layer in model.layers:
        padded = nn.functional.pad(hidden, (layer.dilation[0], 0))
        gate, value = layer(padded).chunk(2, 1)
        hidden = hidden + gate.sigmoid() * value.tanh()
    return hidden.transpose(1, 2)


class Encoded(nn.Module):
    """A layer of torch over ``[N, T, D]`` or ``[T, N, D]``, and the mean over time."""

    def __init__(self, build: Callable[[], nn.Module], first: bool = True) -> None:
        super().__init__()
        self.first, self.layer, self.head = first, build(), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        if self.first:
            return self.head(self.layer(x).mean(1))
        return self.head(self.layer(x.transpose(0, 1))).mean(0)


def decoded(model: Net, x: Tensor) -> Tensor:
    """A decoder over half of the sequence that looks at the other half."""
    memory, target = x.chunk(2, 1)
    return model.head(model.layer(target, memory).mean(1))


def masked_tokens(model: Net, x: Tensor, labels: Tensor) -> Tensor:
    """A head on those tokens alone that are to be predicted."""
    hidden = model.body(x).flatten(0, 1)
    places = (labels.flatten() != -100).nonzero()[:, 0]
    return model.decoder(hidden.index_select(0, places))


def sparse_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the tokens that have a label."""
    labels = batch["y"].flatten()
    return cross_entropy(model(batch["x"], batch["y"]), labels[labels != -100])


def labels_left(batch: Batch) -> float:
    """Labels that count."""
    return labelled(batch["y"])


def next_word(model: nn.Module, batch: Batch) -> Tensor:
    """Each text's words are those to come, shifted by one."""
    logits = model(batch["x"])[:, :-1]
    return cross_entropy(logits.flatten(0, 1), batch["x"][:, 1:].flatten())


def one_hot_words(model: Net, x: Tensor) -> Tensor:
    """Words as vectors of zeros and a one, times a matrix, and a head."""
    return model.head((one_hot(x, WORDS).double() @ model.matrix).tanh().mean(1))


def transcribe(model: nn.Module, batch: Batch) -> Tensor:
    """Connectionist temporal classification, averaged over samples alone."""
    logits = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    n, t = len(batch["x"]), batch["x"].shape[1]
    lengths = torch.full((n,), t), batch["lengths"]
    loss = nn.functional.ctc_loss(logits, batch["y"], *lengths, reduction="sum", zero_infinity=True)
    return loss / n


def transcripts(samples: int, length: int) -> Batch:
    """Words, and what is said in them, of one to three letters."""
    lengths = torch.randint(1, 4, (samples,))
    x = torch.randint(WORDS, (samples, length))
    return {"x": x, "y": torch.randint(1, WORDS, (samples, 3)), "lengths": lengths}


CAUSAL = parted(
    causal, layers=lambda: nn.ModuleList(nn.Conv1d(D, 2 * D, 2, dilation=k) for k in (1, 2))
)


def _layers(length: int) -> dict[str, Build]:
    """Layers for language models, by name."""
    three = dict.fromkeys(("query", "key", "value"), linear(D, D))
    around = {"mix": linear(D, 3 * 8)}, {"out": linear(8, D)}
    kernel = {"decay": lambda: nn.Parameter(torch.rand(D)), "amplitude": parameter(D)}
    steps = {"rate": lambda: nn.Parameter(torch.rand(D, 3)), "step": linear(D, D)}
    return {
        "attention by hand": Attention,
        "fused attention": partial(Attention, True),
        "grouped queries": partial(Attention, False, 1),
        "relative position bias, table": parted(
            biased, **around[0], bias=partial(nn.Embedding, 23, 2), **around[1]
        ),
        "relative position bias, parameter": parted(
            biased, **around[0], bias=parameter(23, 2), **around[1]
        ),
        "learned rotations": parted(
            rotary, frequencies=lambda: nn.Parameter(torch.rand(D // 2)), **three
        ),
        "linear attention": parted(linear_attention, **three),
        "sliding windows": parted(windowed, query=linear(D, D), both=linear(D, 2 * D)),
        "Fourier mixing": parted(
            fourier, net=lambda: nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
        ),
        "complex filter": parted(filtered, weight=parameter(length // 2 + 1, D, 2)),
        "MLP-Mixer": parted(mixer, times=linear(length, length), features=linear(D, D)),
        "state space": parted(state_space, **steps, both=linear(D, 6), skip=parameter(D)),
        "long convolution": parted(long_convolution, **kernel),
        "causal convolutions": CAUSAL,
    }


def _recurrent() -> dict[str, Build]:
    both, head = linear(D + H, H), linear(H, CLASSES)
    narrow = linear(D, CLASSES)
    encoder = partial(nn.TransformerEncoderLayer, D, 2, H, 0.0)
    decoder = partial(nn.TransformerDecoderLayer, D, 2, H, 0.0, batch_first=True)
    attention = partial(nn.MultiheadAttention, D, 2, batch_first=True)
    two_both_ways = {"num_layers": 2, "bidirectional": True}
    return {
        "LSTM": partial(Recurrent, nn.LSTM, True),
        "LSTM, times first": partial(Recurrent, nn.LSTM, False),
        "LSTM, two layers both ways": partial(Recurrent, nn.LSTM, True, **two_both_ways),
        "LSTM with projections": partial(Recurrent, nn.LSTM, True, proj_size=4),
        "GRU": partial(Recurrent, nn.GRU, True),
        "GRU, times first, both ways": partial(Recurrent, nn.GRU, False, bidirectional=True),
        "RNN": partial(Recurrent, nn.RNN, True),
        "RNN of ReLU, times first": partial(Recurrent, nn.RNN, False, nonlinearity="relu"),
        "LSTMCell": partial(Cells, nn.LSTMCell),
        "GRUCell": partial(Cells, nn.GRUCell),
        "RNNCell": partial(Cells, nn.RNNCell),
        "GRUCell, learned start": partial(Cells, nn.GRUCell, True),
        "gated loop by hand": parted(gated_by_hand, gate=both, new=both, head=head),
        "perceiver": parted(perceive, latents=parameter(3, D), attention=attention, head=narrow),
        "MultiheadAttention encoder": partial(Encoded, partial(encoder, batch_first=True)),
        "encoder, times first": partial(Encoded, partial(encoder, norm_first=True), False),
        "decoder": parted(decoded, layer=decoder, head=narrow),
    }


def networks() -> list[Network]:
    """All of them, with as many positions as samples and without."""
    return [*_of_length(4, 7), *_of_length(5, 5)]


def _of_length(samples: int, length: int) -> list[Network]:
    rows, texts = numbers(samples, length, D), words(samples, length)
    tokens, count = labelled_words(samples, length), {"units": labels_left, "samples": samples}
    packed = partial(lengths_batch, samples, length), packed_loss, samples
    unequal = partial(list_batch, samples, length), classify, samples
    first = words_first(samples, length), label_tokens_first, samples, {"x": 1, "y": 1}, labels_left
    spoken = partial(transcripts, samples, length), transcribe, samples
    encoder = partial(nn.GRU, H, H, batch_first=True)
    reading = {"source": partial(nn.Embedding, WORDS, H), "target": partial(nn.Embedding, WORDS, H)}
    coding = {"encoder": encoder, "decoder": encoder, "score": partial(nn.Linear, H, H, bias=False)}
    translation = parted(translate, **reading, **coding, head=linear(2 * H, WORDS))
    turned = {"table": partial(nn.Embedding, WORDS, D), "layer": partial(nn.LSTM, D, H)}
    turned |= {"attention": partial(nn.MultiheadAttention, H, 2), "head": linear(H, WORDS)}
    in_front = {"inside": linear(D, H), "layer": partial(nn.GRU, H, H), "head": linear(H, CLASSES)}
    masked = parted(masked_tokens, body=_language(Attention), decoder=linear(WORDS, WORDS))
    hot = parted(one_hot_words, matrix=parameter(WORDS, H), head=linear(H, CLASSES))
    cases: dict[str, tuple[Any, ...]] = {
        **{name: (build, rows, classify, samples) for name, build in _recurrent().items()},
        **{name: (_language(b), tokens, label_tokens) for name, b in _layers(length).items()},
        "packed LSTM": (partial(Packed, nn.LSTM, False), *packed),
        "packed GRU, all times": (partial(Packed, nn.GRU, True), *packed),
        "layer on packed rows": (parted(packed_in_front, **in_front), *unequal),
        "language, times first": (parted(language_first, **turned), *first),
        "translation": (translation, tokens, label_tokens),
        "tied head": (_language(Attention, tied=True), texts, next_word, samples),
        "positions as a parameter": (
            *(_language(Attention, positions="parameter"), texts, next_word, samples),
        ),
        "masked tokens alone": (masked, tokens, sparse_tokens),
        "one-hot words": (hot, texts, classify, samples),
        "transcription": (_language(CAUSAL), *spoken),
    }
    found = []
    for name, (build, batch, loss, *more) in cases.items():
        options = {} if more else count
        network = Network(
            f"{name}, T = N" if samples == length else name,
            *(KIND, build, batch, loss, *more),
            **options,
        )
        found += also_told(network) if name == "layer on packed rows" else [network]
    return found


def _language(layer: Build, **options: Any) -> Build:
    return lambda: Language(layer(), **options)
