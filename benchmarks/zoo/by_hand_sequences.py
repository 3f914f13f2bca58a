"""Networks of sequences: recurrent ones, attention in many forms, convolutions and filters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, elu, one_hot, scaled_dot_product_attention
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

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


class PackedInFront(nn.Module):
    """A layer in front of the recurrent one is called on the packed rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.layer = nn.Linear(D, H), nn.GRU(H, H)
        self.head = nn.Linear(H, CLASSES)

    def forward(self, x: list[Tensor]) -> Tensor:
        """A list of ``[Tₙ, D]``."""
        packed = pack_sequence(x, enforce_sorted=False)
        packed = packed._replace(data=self.inside(packed.data).tanh())
        return self.head(self.layer(packed)[1][0])


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


class CellsByHand(nn.Module):
    """A gated loop of two linear layers that are called at each time."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(D + H, H), nn.Linear(D + H, H)
        self.head = nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        state = x.new_zeros(len(x), H)
        for step in x.unbind(1):
            both = torch.cat([step, state], 1)
            gate = self.gate(both).sigmoid()
            state = gate * state + (1 - gate) * self.new(both).tanh()
        return self.head(state)


class Translate(nn.Module):
    """An encoder's states, a decoder with teacher forcing, and attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, H), nn.Embedding(WORDS, H)
        self.encoder = nn.GRU(H, H, batch_first=True)
        self.decoder = nn.GRU(H, H, batch_first=True)
        self.score, self.head = nn.Linear(H, H, bias=False), nn.Linear(2 * H, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T]``; the words to come are those that came in."""
        states, last = self.encoder(self.source(x))
        output, _ = self.decoder(self.target(x), last)
        attended = (self.score(output) @ states.transpose(1, 2)).softmax(-1) @ states
        return self.head(torch.cat([output, attended], -1))


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


class LanguageFirst(nn.Module):
    """Words ``[T, N]`` in, words out, with positions in front of samples all the way."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(WORDS, D), nn.LSTM(D, H)
        self.attention = nn.MultiheadAttention(H, 2)
        self.head = nn.Linear(H, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, N]``."""
        hidden, _ = self.layer(self.table(x))
        mixed, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return self.head(hidden + mixed)


def words_first(samples: int, length: int) -> Callable[[], Batch]:
    """Words and labels ``[T, N]``."""
    of = labelled_words(samples, length)
    return lambda: {key: value.T.contiguous() for key, value in of().items()}


class Biased(nn.Module):
    """Attention with a table of relative positions, and queries of linear size."""

    def __init__(self, buckets: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(D, 3 * 8)
        self.bias = nn.Embedding(23, 2) if buckets else nn.Parameter(torch.randn(23, 2))
        self.out = nn.Linear(8, D)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        n, t, _ = x.shape
        query, key, value = self.mix(x).view(n, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
        places = torch.arange(t)
        distance = places[:, None] - places + 11
        table = self.bias(distance) if isinstance(self.bias, nn.Embedding) else self.bias[distance]
        scores = query @ key.transpose(-1, -2) + table.permute(2, 0, 1)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(n, t, 8))


class Rotary(nn.Module):
    """Attention whose queries and keys are rotated by learned frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.rand(D // 2))
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))

    def _rotated(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * self.frequencies
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        scores = self._rotated(self.query(x)) @ self._rotated(self.key(x)).transpose(1, 2)
        return scores.softmax(-1) @ self.value(x)


class LinearAttention(nn.Module):
    """Attention without a softmax, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        query, key = elu(self.query(x)) + 1, elu(self.key(x)) + 1
        state = torch.einsum("ntd,nte->nde", key, self.value(x))
        size = torch.einsum("ntd,nsd->nt", query, key)
        return torch.einsum("ntd,nde->nte", query, state) / size[..., None]


class Windowed(nn.Module):
    """Attention inside of sliding windows that ``unfold`` cuts out."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.both = nn.Linear(D, D), nn.Linear(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        padded = nn.functional.pad(self.both(x), (0, 0, 1, 1))
        key, value = padded.unfold(1, 3, 1).chunk(2, 2)
        scores = torch.einsum("ntd,ntdw->ntw", self.query(x), key)
        return torch.einsum("ntw,ntdw->ntd", scores.softmax(-1), value)


class Latents(nn.Module):
    """Latents that all samples share look at the inputs (Perceiver)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, D))
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        latents = self.latents.expand(len(x), -1, -1)
        return self.head(self.attention(latents, x, x)[0].mean(1))


class Fourier(nn.Module):
    """Mixing by a Fourier transform over time and features (FNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        return self.net(x + torch.fft.fft2(x).real)


class Filter(nn.Module):
    """A learned filter of complex numbers in Fourier space."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length // 2 + 1, D, 2))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        weight = torch.view_as_complex(self.weight)
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * weight, n=x.shape[1], dim=1)


class Mixer(nn.Module):
    """Layers over time and over features in turns."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.times, self.features = nn.Linear(length, length), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        x = x + self.times(x.transpose(1, 2)).transpose(1, 2).tanh()
        return x + self.features(x).tanh()


class StateSpace(nn.Module):
    """A diagonal linear recurrence, step by step, whose steps depend on the inputs (Mamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(D, 3))
        self.step, self.both = nn.Linear(D, D), nn.Linear(D, 6)
        self.skip = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        step = nn.functional.softplus(self.step(x))[..., None]
        inside, outside = self.both(x).chunk(2, -1)
        decay, inputs = (-step * self.rate.exp()).exp(), step * inside[:, :, None] * x[..., None]
        state, outputs = x.new_zeros(len(x), D, 3), []
        for time in range(x.shape[1]):
            state = decay[:, time] * state + inputs[:, time]
            outputs.append((state * outside[:, time, None]).sum(-1))
        return torch.stack(outputs, 1) + self.skip * x


class LongConvolution(nn.Module):
    """A convolution as long as the sequence, by Fourier transforms of a generated kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.amplitude = nn.Parameter(torch.rand(D)), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        t = x.shape[1]
        times = torch.arange(t, dtype=x.dtype)[:, None]
        kernel = self.amplitude * (-self.decay * times).exp()
        product = torch.fft.rfft(x, n=2 * t, dim=1) * torch.fft.rfft(kernel, n=2 * t, dim=0)
        return torch.fft.irfft(product, n=2 * t, dim=1)[:, :t]


class Causal(nn.Module):
    """Dilated causal convolutions with gates (WaveNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(D, 2 * D, 2, dilation=k) for k in (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        hidden = x.transpose(1, 2)
        for layer in self.layers:
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


class Decoded(nn.Module):
    """A decoder over half of the sequence that looks at the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(D, 2, H, 0.0, batch_first=True)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        memory, target = x.chunk(2, 1)
        return self.head(self.layer(target, memory).mean(1))


class MaskedTokens(nn.Module):
    """A head on those tokens alone that are to be predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Language(Attention())
        self.decoder = nn.Linear(WORDS, WORDS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """``[N, T]`` and labels; ``[predicted tokens, K]``."""
        hidden = self.body(x).flatten(0, 1)
        places = (labels.flatten() != -100).nonzero()[:, 0]
        return self.decoder(hidden.index_select(0, places))


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


class OneHot(nn.Module):
    """Words as vectors of zeros and a one, times a matrix, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WORDS, H))
        self.head = nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T]``."""
        return self.head((one_hot(x, WORDS).double() @ self.matrix).tanh().mean(1))


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


def _layers(length: int) -> dict[str, Callable[[], nn.Module]]:
    """Layers for language models, by name."""
    return {
        "attention by hand": Attention,
        "fused attention": partial(Attention, True),
        "grouped queries": partial(Attention, False, 1),
        "relative position bias, table": partial(Biased, True),
        "relative position bias, parameter": partial(Biased, False),
        "learned rotations": Rotary,
        "linear attention": LinearAttention,
        "sliding windows": Windowed,
        "Fourier mixing": Fourier,
        "complex filter": partial(Filter, length),
        "MLP-Mixer": partial(Mixer, length),
        "state space": StateSpace,
        "long convolution": LongConvolution,
        "causal convolutions": Causal,
    }


def _recurrent() -> dict[str, Callable[[], nn.Module]]:
    return {
        "LSTM": partial(Recurrent, nn.LSTM, True),
        "LSTM, times first": partial(Recurrent, nn.LSTM, False),
        "LSTM, two layers both ways": partial(
            Recurrent, nn.LSTM, True, num_layers=2, bidirectional=True
        ),
        "LSTM with projections": partial(Recurrent, nn.LSTM, True, proj_size=4),
        "GRU": partial(Recurrent, nn.GRU, True),
        "GRU, times first, both ways": partial(Recurrent, nn.GRU, False, bidirectional=True),
        "RNN": partial(Recurrent, nn.RNN, True),
        "RNN of ReLU, times first": partial(Recurrent, nn.RNN, False, nonlinearity="relu"),
        "LSTMCell": partial(Cells, nn.LSTMCell),
        "GRUCell": partial(Cells, nn.GRUCell),
        "RNNCell": partial(Cells, nn.RNNCell),
        "GRUCell, learned start": partial(Cells, nn.GRUCell, True),
        "gated loop by hand": CellsByHand,
        "perceiver": Latents,
        "MultiheadAttention encoder": partial(
            Encoded, partial(nn.TransformerEncoderLayer, D, 2, H, 0.0, batch_first=True)
        ),
        "encoder, times first": partial(
            Encoded, partial(nn.TransformerEncoderLayer, D, 2, H, 0.0, norm_first=True), False
        ),
        "decoder": Decoded,
    }


def networks() -> list[Network]:
    """All of them, with as many positions as samples and without."""
    found = []
    for samples, length in ((4, 7), (5, 5)):
        suffix = ", T = N" if samples == length else ""
        rows, texts = numbers(samples, length, D), words(samples, length)
        tokens, count = labelled_words(samples, length), {"units": labels_left, "samples": samples}
        for name, build in _recurrent().items():
            found.append(Network(name + suffix, KIND, build, rows, classify, samples))
        for name, layer in _layers(length).items():
            language = _language(layer)
            found.append(Network(name + suffix, KIND, language, tokens, label_tokens, **count))
        first = {"axes": {"x": 1, "y": 1}, **count}
        packed = partial(lengths_batch, samples, length)
        found += [
            Network(
                f"packed LSTM{suffix}", KIND, _packed(nn.LSTM, False), packed, packed_loss, samples
            ),
            Network(
                f"packed GRU, all times{suffix}",
                KIND,
                _packed(nn.GRU, True),
                packed,
                packed_loss,
                samples,
            ),
            *also_told(
                Network(
                    f"layer on packed rows{suffix}",
                    KIND,
                    PackedInFront,
                    partial(list_batch, samples, length),
                    classify,
                    samples,
                )
            ),
            Network(
                f"language, times first{suffix}",
                KIND,
                LanguageFirst,
                words_first(samples, length),
                label_tokens_first,
                **first,
            ),
            Network(f"translation{suffix}", KIND, Translate, tokens, label_tokens, **count),
            Network(
                f"tied head{suffix}",
                KIND,
                lambda: Language(Attention(), True),
                texts,
                next_word,
                samples,
            ),
            Network(
                f"positions as a parameter{suffix}",
                KIND,
                lambda: Language(Attention(), positions="parameter"),
                texts,
                next_word,
                samples,
            ),
            Network(
                f"masked tokens alone{suffix}", KIND, MaskedTokens, tokens, sparse_tokens, **count
            ),
            Network(f"one-hot words{suffix}", KIND, OneHot, texts, classify, samples),
            Network(
                f"transcription{suffix}",
                KIND,
                lambda: Language(Causal()),
                partial(transcripts, samples, length),
                transcribe,
                samples,
            ),
        ]
    return found


def _language(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Language(layer())


def _packed(layer: Callable[..., nn.RNNBase], padded: bool) -> Callable[[], nn.Module]:
    return partial(Packed, layer, padded)
