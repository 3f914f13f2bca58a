"""Layers for random networks, and ways to call them.

A state is ``[N, T, D]``, or ``[N, D]`` without positions. No layer lets samples meet except those
in ``COUPLINGS``, and what a layer does with a sample depends on that sample alone, so that it does
the same with a batch of one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

VOCABULARY, EXPERTS = 5, 3


@dataclass(frozen=True)
class Sizes:
    """What a state has besides samples: T positions, or ``None``, of width D."""

    positions: int | None
    width: int

    @property
    def length(self) -> int:
        assert self.positions is not None
        return self.positions


class Written(nn.Module):
    """A function of the state and of some modules, parameters (from shapes) and fixed tensors."""

    def __init__(
        self, function: Callable[..., Any], *things: nn.Module | tuple[int, ...] | Tensor
    ) -> None:
        super().__init__()
        self.function = function
        self.names = [f"thing{place}" for place in range(len(things))]
        for name, thing in zip(self.names, things, strict=True):
            if isinstance(thing, Tensor):
                self.register_buffer(name, thing)
            else:
                own = nn.Parameter(torch.randn(thing) * 0.6) if isinstance(thing, tuple) else thing
                setattr(self, name, own)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *(getattr(self, name) for name in self.names))


class LinearFunction(torch.autograd.Function):
    """A linear layer with its backward written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        gradient = gradient.to(x.dtype)  # under autocast
        rows = gradient.reshape(-1, gradient.shape[-1])
        return gradient @ weight, rows.T @ x.reshape(-1, x.shape[-1])


class Reversed(torch.autograd.Function):
    """The identity, with the negative of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Symmetric(nn.Module):
    """A parametrisation by the sum of a matrix and its transpose."""

    def forward(self, matrix: Tensor) -> Tensor:
        return matrix + matrix.T


class FrozenBatchNorm(nn.BatchNorm1d):
    """Always in eval mode."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.eval()

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(False)
        return self


def key(x: Tensor, direction: Tensor) -> Tensor:
    """A number for each vector of the state, without a gradient: ``[..., D] -> [...]``.

    It isn't linear, so that it doesn't vanish on average behind a normalisation.
    """
    return (x.detach() @ direction + 0.3).tanh()


def sample_key(x: Tensor, direction: Tensor) -> Tensor:
    """A number for each sample, ``[N]``."""
    keys = key(x, direction)
    return keys.mean(1) if keys.dim() > 1 else keys


def lengths_of(x: Tensor, direction: Tensor) -> Tensor:
    """How many positions of each sample are its own, from one to T, ``[N]``."""
    share = (3 * sample_key(x, direction)).sigmoid()
    return (1 + (share * x.shape[1]).long()).clamp(max=x.shape[1])


def words_of(x: Tensor, direction: Tensor) -> Tensor:
    """A word for each vector of the state."""
    return (key(x, direction).sigmoid() * VOCABULARY).long().clamp(0, VOCABULARY - 1)


def symmetric_linear(width: int) -> nn.Module:
    layer = nn.Linear(width, width)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def frozen_batchnorm(x: Tensor, norm: nn.Module) -> Tensor:
    return norm(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * gain


def norm_by_hand(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gain + shift


def bmm_with_expanded(x: Tensor, weight: Tensor) -> Tensor:
    """One product for each vector, all with the same matrix."""
    rows = x.reshape(-1, 1, x.shape[-1])
    return torch.bmm(rows, weight.expand(len(rows), -1, -1)).reshape(x.shape)


def baddbmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = x.reshape(-1, 1, x.shape[-1])
    return torch.baddbmm(bias, rows, weight.expand(len(rows), -1, -1)).reshape(x.shape)


def addmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).reshape(x.shape)


def fourier(x: Tensor, weight: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * weight, n=x.shape[-1])


def mixed_experts(x: Tensor, gate: nn.Module, first: nn.Module, second: nn.Module) -> Tensor:
    """All experts see all samples, and a softmax mixes what they say."""
    shares = gate(x).softmax(-1)
    return shares[..., :1] * first(x) + shares[..., 1:] * second(x)


def lora(x: Tensor, frozen: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ frozen + x @ a @ b


def over_vectors(x: Tensor, layer: nn.Module) -> Tensor:
    """The layer is vectorised over samples."""
    rows = x.reshape(-1, x.shape[-1])
    return torch.vmap(lambda row: layer(row))(rows).reshape(x.shape)


def nearest(x: Tensor, codes: Tensor) -> Tensor:
    """Distances from the entries of a table."""
    return -torch.cdist(x.reshape(-1, x.shape[-1]), codes).reshape(x.shape)


def looked_up(x: Tensor, matrices: Tensor, towards: Tensor) -> Tensor:
    """Each vector has the matrix of its word."""
    return (x[..., None, :] @ matrices[words_of(x, towards)])[..., 0, :]


def linear(sizes: Sizes) -> nn.Module:
    return nn.Linear(sizes.width, sizes.width)


def direction(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.width)


Make = Callable[[Sizes, random.Random], nn.Module]

VECTOR_LAYERS: dict[str, Make] = {
    "linear": lambda s, r: linear(s),
    "linear without bias": lambda s, r: nn.Linear(s.width, s.width, bias=False),
    "layer norm": lambda s, r: nn.LayerNorm(s.width),
    "norm by hand": lambda s, r: Written(norm_by_hand, (s.width,), (s.width,)),
    "rms norm": lambda s, r: Written(rms_norm, (s.width,)),
    "rms norm of torch": lambda s, r: nn.RMSNorm(s.width, eps=1e-3),
    "frozen batch norm": lambda s, r: Written(frozen_batchnorm, FrozenBatchNorm(s.width)),
    "scale and shift": lambda s, r: Written(lambda x, w, b: x * w + b, (s.width,), (s.width,)),
    "temperature": lambda s, r: Written(lambda x, t: (x * t).softmax(-1), ()),
    "matrix product": lambda s, r: Written(lambda x, w: x @ w, (s.width, s.width)),
    "einsum": lambda s, r: Written(
        lambda x, w: torch.einsum("...i,ji->...j", x, w), (s.width, s.width)
    ),
    "tensordot": lambda s, r: Written(
        lambda x, w: torch.tensordot(x, w, dims=1), (s.width, s.width)
    ),
    "addmm": lambda s, r: Written(addmm, (s.width, s.width), (s.width,)),
    "bmm with an expanded matrix": lambda s, r: Written(bmm_with_expanded, (s.width, s.width)),
    "baddbmm": lambda s, r: Written(baddbmm, (1, s.width, s.width), (1, 1, s.width)),
    "functional linear": lambda s, r: Written(
        lambda x, layer: F.linear(x, layer.weight, layer.bias), linear(s)
    ),
    "there and back": lambda s, r: Written(
        lambda x, layer: layer(x).tanh() @ layer.weight, linear(s)
    ),
    "autograd function": lambda s, r: Written(
        lambda x, w: LinearFunction.apply(x, w), (s.width, s.width)
    ),
    "vmap": lambda s, r: Written(over_vectors, linear(s)),
    "low rank": lambda s, r: Written(
        lora, torch.randn(s.width, s.width) / 2, (s.width, 2), (2, s.width)
    ),
    "weight norm": lambda s, r: parametrizations.weight_norm(linear(s)),
    "symmetric": lambda s, r: symmetric_linear(s.width),
    "perceptron": lambda s, r: nn.Sequential(linear(s), nn.ReLU(inplace=True), linear(s)),
    "gated": lambda s, r: Written(
        lambda x, a, b: a(x).tanh() * b(x).sigmoid(), linear(s), linear(s)
    ),
    "bilinear": lambda s, r: Written(
        lambda x, layer: layer(x, x.sin()), nn.Bilinear(s.width, s.width, s.width)
    ),
    "prelu": lambda s, r: nn.Sequential(linear(s), nn.PReLU()),
    "fourier": lambda s, r: Written(fourier, (s.width // 2 + 1,)),
    "mixed experts": lambda s, r: Written(
        mixed_experts, nn.Linear(s.width, 2), linear(s), linear(s)
    ),
    "dropout": lambda s, r: nn.Sequential(linear(s), nn.Dropout(0.5)),
    "codebook": lambda s, r: Written(
        lambda x, table, v: x + table(words_of(x, v)),
        nn.Embedding(VOCABULARY, s.width),
        direction(s),
    ),
    "activation": lambda s, r: r.choice(
        [nn.Tanh(), nn.GELU(), nn.ReLU(), nn.Sigmoid(), nn.Softmax(-1)]
    ),
    "nearest": lambda s, r: Written(nearest, (s.width, s.width)),
}
"""Layers of vectors, with any axes in front: ``[..., D] -> [..., D]``."""


def swapped(x: Tensor, layer: nn.Module) -> Tensor:
    """The layer sees positions first."""
    found = layer(x.transpose(0, 1))
    return (found[0] if isinstance(found, tuple) else found).transpose(0, 1)


def along_width(x: Tensor, layer: nn.Module) -> Tensor:
    """The layer sees widths before positions."""
    return layer(x.mT)[..., : x.shape[1]].mT


def as_image(x: Tensor, convolution: nn.Module) -> Tensor:
    return convolution(x[:, None]).mean(1)


def first_of(x: Tensor, layer: nn.Module) -> Tensor:
    return layer(x)[0]


def projected(x: Tensor, layer: nn.Module, projection: nn.Module) -> Tensor:
    return projection(layer(x)[0])


def packed(x: Tensor, layer: nn.Module, towards: Tensor) -> Tensor:
    """A recurrent layer on the sequences packed in the order of the batch."""
    sequence = pack_padded_sequence(x, lengths_of(x, towards), True, enforce_sorted=False)
    return pad_packed_sequence(layer(sequence)[0], True, total_length=x.shape[1])[0]


def packed_in_order(x: Tensor, layer: nn.Module, towards: Tensor) -> Tensor:
    """A recurrent layer on the sequences sorted by length, which are put back."""
    lengths, order = lengths_of(x, towards).sort(descending=True)
    sequence = pack_padded_sequence(x[order].transpose(0, 1), lengths)
    padded, _ = pad_packed_sequence(layer(sequence)[0], total_length=x.shape[1])
    return padded.transpose(0, 1)[order.argsort()]


def packed_vectors(x: Tensor, layer: nn.Module, towards: Tensor) -> Tensor:
    """A layer of vectors on the packed data themselves."""
    sequence = pack_padded_sequence(x, lengths_of(x, towards), True, enforce_sorted=False)
    found = PackedSequence(
        layer(sequence.data),
        sequence.batch_sizes,
        sequence.sorted_indices,
        sequence.unsorted_indices,
    )
    return pad_packed_sequence(found, True, total_length=x.shape[1])[0]


def lstm_cells(x: Tensor, cell: nn.Module) -> Tensor:
    state = (torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]))
    outputs = []
    for step in x.unbind(1):
        state = cell(step, state)
        outputs.append(state[0])
    return torch.stack(outputs, 1)


def gru_cells(x: Tensor, cell: nn.Module, head: nn.Module, start: Tensor) -> Tensor:
    """States, of which the first is learned, are stacked with positions first, as a head reads."""
    state = start.expand(len(x), -1)
    states = []
    for step in x.unbind(1):
        state = cell(step, state)
        states.append(state)
    return head(torch.stack(states)).transpose(0, 1)


def gated_loop(x: Tensor, gate: nn.Module, new: nn.Module) -> Tensor:
    """Two linear layers that are called at each position."""
    state, states = torch.zeros_like(x[:, 0]), []
    for step in x.unbind(1):
        both = torch.cat([step, state], 1)
        share = gate(both).sigmoid()
        state = share * state + (1 - share) * new(both).tanh()
        states.append(state)
    return torch.stack(states, 1)


def state_space(x: Tensor, step: nn.Module, both: nn.Module, rate: Tensor) -> Tensor:
    """A diagonal linear recurrence, whose steps depend on the inputs (Mamba)."""
    size = F.softplus(step(x))[..., None]
    inside, outside = both(x).chunk(2, -1)
    decay, inputs = (-size * rate.exp()).exp(), size * inside[:, :, None] * x[..., None]
    state, outputs = torch.zeros_like(inputs[:, 0]), []
    for time in range(x.shape[1]):
        state = decay[:, time] * state + inputs[:, time]
        outputs.append((state * outside[:, time, None]).sum(-1))
    return torch.stack(outputs, 1)


def long_convolution(x: Tensor, decay: Tensor, amplitude: Tensor) -> Tensor:
    """A convolution as long as the sequence, by Fourier transforms of a generated kernel."""
    length = x.shape[1]
    times = torch.arange(length, dtype=x.dtype)[:, None]
    kernel = amplitude * (-decay.square() * times).exp()
    product = torch.fft.rfft(x, 2 * length, 1) * torch.fft.rfft(kernel, 2 * length, 0)
    return torch.fft.irfft(product, 2 * length, 1)[:, :length]


def complex_filter(x: Tensor, weight: Tensor) -> Tensor:
    """A learned filter of complex numbers in Fourier space."""
    found = torch.fft.rfft(x, dim=1) * torch.view_as_complex(weight)
    return torch.fft.irfft(found, x.shape[1], 1)


def causal(x: Tensor, convolution: nn.Module) -> Tensor:
    """A causal convolution with a gate (WaveNet)."""
    gate, value = convolution(F.pad(x.mT, (1, 0))).chunk(2, 1)
    return x + (gate.sigmoid() * value.tanh()).mT


def heads_of(width: int) -> int:
    return 2 if width % 2 == 0 else 1


def attention_by_hand(x: Tensor, qkv: nn.Module, out: nn.Module) -> Tensor:
    q, k, v = qkv(x).unflatten(-1, (3, heads_of(x.shape[-1]), -1)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return out((scores @ v).transpose(1, 2).flatten(2))


def fused_attention(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    return F.scaled_dot_product_attention(q(x), k(x), v(x), is_causal=True)


def attention_of_einsums(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries, keys, values = (torch.einsum("ntd,de->nte", x, w) for w in (q, k, v))
    scores = torch.einsum("nte,nse->nts", queries, keys).softmax(-1)
    return torch.einsum("nts,nse->nte", scores, values)


def grouped_queries(x: Tensor, q: nn.Module, kv: nn.Module) -> Tensor:
    """All heads of queries have the same keys and values."""
    queries = q(x).unflatten(-1, (heads_of(x.shape[-1]), -1)).transpose(1, 2)
    keys, values = kv(x)[:, None].expand(-1, queries.shape[1], -1, -1).chunk(2, -1)
    return ((queries @ keys.mT).softmax(-1) @ values).transpose(1, 2).flatten(2)


def rotated(x: Tensor, frequencies: Tensor) -> Tensor:
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    return x * angle.cos() + x.roll(1, -1) * angle.sin()


def rotary(x: Tensor, q: nn.Module, k: nn.Module, frequencies: Tensor) -> Tensor:
    """Attention whose queries and keys are rotated by learned frequencies."""
    scores = rotated(q(x), frequencies) @ rotated(k(x), frequencies).mT
    return scores.softmax(-1) @ x


def linear_attention(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    """Attention without a softmax, by einsum."""
    query, key = F.elu(q(x)) + 1, F.elu(k(x)) + 1
    state = torch.einsum("ntd,nte->nde", key, v(x))
    size = torch.einsum("ntd,nsd->nt", query, key)
    return torch.einsum("ntd,nde->nte", query, state) / size[..., None]


def sliding_windows(x: Tensor, query: nn.Module, both: nn.Module) -> Tensor:
    """Attention inside of windows that ``unfold`` cuts out."""
    keys, values = F.pad(both(x), (0, 0, 1, 1)).unfold(1, 3, 1).chunk(2, 2)
    scores = torch.einsum("ntd,ntdw->ntw", query(x), keys)
    return torch.einsum("ntw,ntdw->ntd", scores.softmax(-1), values)


def multihead(x: Tensor, layer: nn.Module) -> Tensor:
    return layer(x, x, x, need_weights=False)[0]


def multihead_swapped(x: Tensor, layer: nn.Module) -> Tensor:
    x = x.transpose(0, 1)
    return layer(x, x.tanh(), x)[0].transpose(0, 1)


def multihead_padded(x: Tensor, layer: nn.Module, towards: Tensor) -> Tensor:
    padding = torch.arange(x.shape[1]) >= lengths_of(x, towards)[:, None]
    return layer(x, x, x, key_padding_mask=padding)[0]


def relative_attention(x: Tensor, qkv: nn.Module, table: Tensor) -> Tensor:
    """A table of relative positions that all samples share."""
    q, k, v = qkv(x).chunk(3, -1)
    places = torch.arange(x.shape[1])
    bias = table[places[:, None] - places + x.shape[1] - 1]
    return (q @ k.mT + bias).softmax(-1) @ v


def attention_of_queries(x: Tensor, queries: Tensor, kv: nn.Module) -> Tensor:
    """Queries that all samples share."""
    keys, values = kv(x).chunk(2, -1)
    found = F.scaled_dot_product_attention(queries.expand(len(x), -1, -1), keys, values)
    return x + found.mean(1, keepdim=True)


def windows(x: Tensor, layer: nn.Module) -> Tensor:
    """A layer of overlapping windows of two positions."""
    padded = F.pad(x, (0, 0, 0, 1))
    return layer(padded.unfold(1, 2, 1).flatten(2))


def folded_windows(x: Tensor, convolution: nn.Module) -> Tensor:
    """A convolution on small images, each of two positions, that are folded into the batch."""
    images = F.pad(x, (0, 0, 0, 1)).unfold(1, 2, 1).flatten(0, 1).unsqueeze(1)
    found = convolution(images).mean((2, 3))
    return found.unflatten(0, x.shape[:2])


def sorted_positions(x: Tensor, layer: nn.Module, scale: Tensor, towards: Tensor) -> Tensor:
    """A layer and a scale by rank on positions that are sorted within each sample and put back."""
    # Equal words have equal keys, but for rounding: their order is that of the positions.
    order = key(x, towards).round(decimals=6).argsort(dim=1, stable=True)
    places = order[..., None].expand_as(x)
    found = layer(x.gather(1, places)) * scale
    return torch.zeros_like(x).scatter(1, places, found)


def every_other(x: Tensor, layer: nn.Module) -> Tensor:
    """A layer on every other position."""
    places = torch.arange(0, x.shape[1], 2)
    return x.index_copy(1, places, layer(x.index_select(1, places)))


def largest(x: Tensor, layer: nn.Module) -> Tensor:
    return x + layer(x.max(1).values)[:, None]


def bag(x: Tensor, table: nn.Module, towards: Tensor) -> Tensor:
    """The words of each sample, of some number, are one list with offsets."""
    counts = lengths_of(x, towards)
    taken = torch.arange(x.shape[1]) < counts[:, None]
    offsets = counts.cumsum(0) - counts
    return x + table(words_of(x, towards)[taken], offsets)[:, None]


def weighted_bag(x: Tensor, table: nn.Module, towards: Tensor) -> Tensor:
    weights = x.mean(-1).sigmoid()
    return x + table(words_of(x, towards), per_sample_weights=weights)[:, None]


def encoder_layer(width: int, batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, heads_of(width), 5, dropout=0.0, batch_first=batch_first
    )


def multihead_attention(sizes: Sizes, batch_first: bool) -> nn.Module:
    return nn.MultiheadAttention(
        sizes.width, heads_of(sizes.width), batch_first=batch_first, bias=sizes.width != 3
    )


SEQUENCE_LAYERS: dict[str, Make] = {
    "convolution": lambda s, r: Written(along_width, nn.Conv1d(s.width, s.width, 3, padding=1)),
    "depthwise convolution": lambda s, r: Written(
        along_width, nn.Conv1d(s.width, s.width, 2, padding=1, groups=s.width)
    ),
    "transposed convolution": lambda s, r: Written(
        along_width, nn.ConvTranspose1d(s.width, s.width, 2)
    ),
    "convolution of images": lambda s, r: Written(as_image, nn.Conv2d(1, 2, 3, padding=1)),
    "group norm": lambda s, r: Written(along_width, nn.GroupNorm(1, s.width)),
    "instance norm": lambda s, r: (
        Written(along_width, nn.InstanceNorm1d(s.width, affine=True)) if s.length > 1 else linear(s)
    ),
    "gru": lambda s, r: Written(first_of, nn.GRU(s.width, s.width, batch_first=True)),
    "gru, positions first": lambda s, r: Written(swapped, nn.GRU(s.width, s.width)),
    "lstm": lambda s, r: Written(first_of, nn.LSTM(s.width, s.width, batch_first=True)),
    "lstm, positions first": lambda s, r: Written(swapped, nn.LSTM(s.width, s.width, num_layers=2)),
    "rnn": lambda s, r: Written(first_of, nn.RNN(s.width, s.width, batch_first=True)),
    "bidirectional lstm": lambda s, r: Written(
        projected, nn.LSTM(s.width, 2, batch_first=True, bidirectional=True), nn.Linear(4, s.width)
    ),
    "two lstms both ways": lambda s, r: Written(
        projected,
        nn.LSTM(s.width, 2, num_layers=2, batch_first=True, bidirectional=True),
        nn.Linear(4, s.width),
    ),
    "lstm with projections": lambda s, r: Written(
        projected, nn.LSTM(s.width, 2, batch_first=True, proj_size=1), nn.Linear(1, s.width)
    ),
    "rnn of relu, positions first": lambda s, r: Written(
        swapped, nn.RNN(s.width, s.width, nonlinearity="relu")
    ),
    "packed gru": lambda s, r: Written(
        packed, nn.GRU(s.width, s.width, batch_first=True), direction(s)
    ),
    "packed lstm": lambda s, r: Written(
        packed, nn.LSTM(s.width, s.width, batch_first=True), direction(s)
    ),
    "packed rnn, sorted": lambda s, r: Written(
        packed_in_order, nn.RNN(s.width, s.width), direction(s)
    ),
    "packed lstm, sorted": lambda s, r: Written(
        packed_in_order, nn.LSTM(s.width, s.width), direction(s)
    ),
    "packed linear": lambda s, r: Written(packed_vectors, linear(s), direction(s)),
    "lstm cells": lambda s, r: Written(lstm_cells, nn.LSTMCell(s.width, s.width)),
    "gru cells": lambda s, r: Written(
        gru_cells, nn.GRUCell(s.width, s.width), linear(s), (s.width,)
    ),
    "gated loop": lambda s, r: Written(
        gated_loop, nn.Linear(2 * s.width, s.width), nn.Linear(2 * s.width, s.width)
    ),
    "state space": lambda s, r: Written(
        state_space, linear(s), nn.Linear(s.width, 6), (s.width, 3)
    ),
    "long convolution": lambda s, r: Written(long_convolution, (s.width,), (s.width,)),
    "complex filter": lambda s, r: Written(complex_filter, (s.length // 2 + 1, s.width, 2)),
    "fourier mixing": lambda s, r: Written(
        lambda x, layer: layer(x + torch.fft.fft2(x).real), linear(s)
    ),
    "causal convolution": lambda s, r: Written(causal, nn.Conv1d(s.width, 2 * s.width, 2)),
    "shifted positions": lambda s, r: Written(
        lambda x, share: share * x + (1 - share) * F.pad(x, (0, 0, 1, -1)), (s.width,)
    ),
    "attention by hand": lambda s, r: Written(
        attention_by_hand, nn.Linear(s.width, 3 * s.width), linear(s)
    ),
    "fused attention": lambda s, r: Written(fused_attention, linear(s), linear(s), linear(s)),
    "attention of einsums": lambda s, r: Written(attention_of_einsums, *[(s.width, s.width)] * 3),
    "grouped queries": lambda s, r: Written(
        grouped_queries, linear(s), nn.Linear(s.width, 2 * (s.width // heads_of(s.width)))
    ),
    "learned rotations": lambda s, r: Written(rotary, linear(s), linear(s), (s.width,)),
    "linear attention": lambda s, r: Written(linear_attention, linear(s), linear(s), linear(s)),
    "sliding windows": lambda s, r: Written(
        sliding_windows, linear(s), nn.Linear(s.width, 2 * s.width)
    ),
    "multihead attention": lambda s, r: Written(multihead, multihead_attention(s, True)),
    "multihead attention, positions first": lambda s, r: Written(
        multihead_swapped, multihead_attention(s, False)
    ),
    "multihead attention, padded": lambda s, r: Written(
        multihead_padded, multihead_attention(s, True), direction(s)
    ),
    "attention with relative positions": lambda s, r: Written(
        relative_attention, nn.Linear(s.width, 3 * s.width), (2 * s.length - 1,)
    ),
    "attention of shared queries": lambda s, r: Written(
        attention_of_queries, (2, s.width), nn.Linear(s.width, 2 * s.width)
    ),
    "encoder layer": lambda s, r: encoder_layer(s.width, True),
    "decoder layer": lambda s, r: Written(
        lambda x, layer: layer(x, x.tanh()),
        nn.TransformerDecoderLayer(s.width, heads_of(s.width), 5, 0.0, batch_first=True),
    ),
    "encoder layer, positions first": lambda s, r: Written(swapped, encoder_layer(s.width, False)),
    "positions [1, T, D]": lambda s, r: Written(lambda x, p: x + p, (1, s.length, s.width)),
    "positions [T, D]": lambda s, r: Written(lambda x, p: x + p, (s.length, s.width)),
    "positions [T, 1, D]": lambda s, r: Written(
        lambda x, p: (x.transpose(0, 1) + p).transpose(0, 1), (s.length, 1, s.width)
    ),
    "positions looked up": lambda s, r: Written(
        lambda x, table: x + table(torch.arange(x.shape[1])), nn.Embedding(s.length, s.width)
    ),
    "positions looked up for each": lambda s, r: Written(
        lambda x, table: x + table(torch.arange(x.shape[1]).expand(len(x), -1)),
        nn.Embedding(s.length, s.width),
    ),
    "positions looked up once": lambda s, r: Written(
        lambda x, table: x + table(torch.arange(x.shape[1])[None]), nn.Embedding(s.length, s.width)
    ),
    "mixed positions": lambda s, r: Written(along_width, nn.Linear(s.length, s.length)),
    "windows": lambda s, r: Written(windows, nn.Linear(2 * s.width, s.width)),
    "folded windows": lambda s, r: Written(folded_windows, nn.Conv2d(1, s.width, (s.width, 1))),
    "sorted positions": lambda s, r: Written(
        sorted_positions, linear(s), (s.length, 1), direction(s)
    ),
    "every other position": lambda s, r: Written(every_other, linear(s)),
    "largest over positions": lambda s, r: Written(largest, linear(s)),
    **{
        f"bag with offsets, {mode}": lambda s, r, mode=mode: Written(
            bag, nn.EmbeddingBag(VOCABULARY, s.width, mode=mode), direction(s)
        )
        for mode in ("sum", "mean", "max")
    },
    "orthogonal": lambda s, r: parametrizations.orthogonal(linear(s)),
    "matrices looked up": lambda s, r: Written(
        looked_up, (VOCABULARY, s.width, s.width), direction(s)
    ),
    "weighted bag": lambda s, r: Written(
        weighted_bag, nn.EmbeddingBag(VOCABULARY, s.width, mode="sum"), direction(s)
    ),
}
"""Layers of sequences, with samples first: ``[N, T, D] -> [N, T, D]``."""


def first_position(x: Tensor) -> Tensor:
    return x[:, 0]


def last_own_position(x: Tensor, towards: Tensor) -> Tensor:
    return x[torch.arange(len(x)), lengths_of(x, towards) - 1]


def attention_pool(x: Tensor, query: Tensor) -> Tensor:
    return ((x @ query).softmax(1)[..., None] * x).sum(1)


def with_shared(x: Tensor, shared: Tensor) -> Tensor:
    """Tokens that all samples share, in front of the positions."""
    return torch.cat([shared.expand(len(x), -1, -1), x], 1)


def with_looked_up(x: Tensor, table: nn.Module) -> Tensor:
    """Prompts from a table that is looked up once for all samples."""
    prompts = table(torch.arange(2)[None])
    return torch.cat([prompts.expand(len(x), -1, -1), x], 1)


def highest_positions(x: Tensor, kept: int, towards: Tensor) -> Tensor:
    places = key(x, towards).topk(kept, dim=1).indices
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def merged_positions(x: Tensor, layer: nn.Module) -> Tensor:
    """Two positions become one."""
    return layer(F.pad(x, (0, 0, 0, x.shape[1] % 2)).unflatten(1, (-1, 2)).flatten(2))


Shape = Callable[[Sizes], tuple[nn.Module, int | None]]


def half(length: int) -> int:
    return (length + 1) // 2


SHAPES: dict[str, Shape] = {
    "class token": lambda s: (Written(with_shared, (1, 1, s.width)), s.length + 1),
    "prompts": lambda s: (Written(with_shared, (2, s.width)), s.length + 2),
    "prompts looked up": lambda s: (
        Written(with_looked_up, nn.Embedding(2, s.width)),
        s.length + 2,
    ),
    "highest positions": lambda s: (
        Written(lambda x, v: highest_positions(x, half(s.length), v), direction(s)),
        half(s.length),
    ),
    "merged positions": lambda s: (
        Written(merged_positions, nn.Linear(2 * s.width, s.width)),
        half(s.length),
    ),
    "strided convolution": lambda s: (
        Written(lambda x, c: c(x.mT).mT, nn.Conv1d(s.width, s.width, 2, stride=2, padding=1)),
        s.length // 2 + 1,
    ),
    "pooled: mean": lambda s: (Written(lambda x: x.mean(1)), None),
    "pooled: largest": lambda s: (Written(lambda x: x.amax(1)), None),
    "pooled: first": lambda s: (Written(first_position), None),
    "pooled: last": lambda s: (Written(last_own_position, direction(s)), None),
    "pooled: attention": lambda s: (Written(attention_pool, (s.width,)), None),
    "pooled: flattened": lambda s: (
        nn.Sequential(nn.Flatten(), nn.Linear(s.length * s.width, s.width)),
        None,
    ),
}
"""Layers that change the number of positions, and the new number."""

POOLS = [name for name in SHAPES if name.startswith("pooled")]

SPREADS: dict[str, Shape] = {
    "spread: positions": lambda s: (Written(lambda x, p: x[:, None] * p, (3, s.width)), 3),
    "spread: outer product": lambda s: (
        Written(lambda x, p: torch.einsum("nd,t->ntd", x, p), (3,)),
        3,
    ),
    "spread: unflattened": lambda s: (
        nn.Sequential(nn.Linear(s.width, 2 * s.width), nn.Unflatten(1, (2, s.width))),
        2,
    ),
}
"""Layers that give positions to a state without any."""


def batch_attention(x: Tensor, q: nn.Module, k: nn.Module) -> Tensor:
    """Every sample attends to all of the batch."""
    flat = x.flatten(1)
    scores = q(x).flatten(1) @ k(x).flatten(1).T
    return (scores.softmax(-1) @ flat).reshape(x.shape)


def standardised(x: Tensor, gain: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-2).sqrt() * gain


def batch_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return norm(x.mT).mT if x.dim() == 3 else norm(x)


COUPLINGS: dict[str, Make] = {
    "batch norm": lambda s, r: Written(batch_norm, nn.BatchNorm1d(s.width)),
    "batch norm by hand": lambda s, r: Written(standardised, (s.width,)),
    "centred batch": lambda s, r: Written(lambda x: x - 0.5 * x.mean(0)),
    "softmax over the batch": lambda s, r: Written(lambda x: x.softmax(0) + x),
    "attention across the batch": lambda s, r: Written(batch_attention, linear(s), linear(s)),
}
"""Layers in which samples meet."""


# Ways to call a layer.


class Called(nn.Module):
    """A layer, or several of them, called in one of the ``WAYS``."""

    def __init__(self, way: str, layers: list[nn.Module], width: int, seed: int) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(layers)
        self.seed = seed
        self.register_buffer("towards", torch.randn(width))
        if way.startswith("routed"):
            self.gate = nn.Linear(width, len(layers))

    @property
    def layer(self) -> nn.Module:
        return self.layers[0]

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.way](self, x)

    def order(self, x: Tensor) -> Tensor:
        """A random order of the samples, which depends on their number alone."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(len(x), generator=generator)

    def mask(self, x: Tensor) -> Tensor:
        """Some of the samples, or all or none of them."""
        return sample_key(x, self.towards) > 0

    def on(self, x: Tensor, layer: nn.Module) -> Tensor:
        """The layer on any number of rows; only a linear one is called on none."""
        return layer(x) if len(x) or isinstance(layer, nn.Linear) else x


def once(self: Called, x: Tensor) -> Tensor:
    return self.layer(x)


def chunks(self: Called, x: Tensor) -> Tensor:
    source, sizes = random.Random(self.seed), []
    while sum(sizes) < len(x):
        sizes.append(min(source.randint(1, 3), len(x) - sum(sizes)))
    return torch.cat([self.layer(part) for part in x.split(sizes)])


def rows(self: Called, x: Tensor) -> Tensor:
    return torch.cat([self.layer(x[n : n + 1]) for n in range(len(x))])


def permuted(self: Called, x: Tensor) -> Tensor:
    order = self.order(x)
    return self.layer(x[order])[order.argsort()]


def sorted_by_key(self: Called, x: Tensor) -> Tensor:
    order = sample_key(x, self.towards).argsort()
    return torch.empty_like(x).index_copy(0, order, self.layer(x.index_select(0, order)))


def flipped(self: Called, x: Tensor) -> Tensor:
    return self.layer(x.flip(0)).flip(0)


def both_orders(self: Called, x: Tensor) -> Tensor:
    """The layer is used on the batch and on the flipped batch."""
    return self.layer(x) + self.layer(x.flip(0)).flip(0)


def masked(self: Called, x: Tensor) -> Tensor:
    chosen, found = self.mask(x), x.clone()
    found[chosen] = self.on(x[chosen], self.layer)
    return found


def masked_where(self: Called, x: Tensor) -> Tensor:
    chosen = self.mask(x).reshape(-1, *[1] * (x.dim() - 1))
    return torch.where(chosen, self.layer(x), x)


def masked_scatter(self: Called, x: Tensor) -> Tensor:
    chosen = self.mask(x)
    places = chosen.reshape(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return x.masked_scatter(places, self.on(x[chosen], self.layer))


def added_to_some(self: Called, x: Tensor) -> Tensor:
    places = self.mask(x).nonzero().flatten()
    return x.index_add(0, places, self.on(x[places], self.layer))


def row_by_row_or_not(self: Called, x: Tensor) -> Tensor:
    """A decision in Python for each sample."""
    pairs = zip(x.split(1), self.mask(x).tolist(), strict=True)
    return torch.cat([self.layer(row) if chosen else row for row, chosen in pairs])


def every_other_sample(self: Called, x: Tensor) -> Tensor:
    found = torch.empty_like(x)
    found[::2] = self.layer(x[::2])
    found[1::2] = self.on(x[1::2], self.layer)
    return found


def two_views(self: Called, x: Tensor) -> Tensor:
    first, second = self.layer(torch.cat([x, x.flip(-1)])).chunk(2)
    return first - 0.5 * second


def interleaved_views(self: Called, x: Tensor) -> Tensor:
    views = torch.stack([x, x.sin()], 1).flatten(0, 1)
    return self.layer(views).unflatten(0, (-1, 2)).sum(1)


def early_exit(self: Called, x: Tensor) -> Tensor:
    """Samples that are done leave the loop."""
    left, found = torch.arange(len(x)), x
    for _ in range(3):
        left = left[self.mask(found[left])]
        found = found.index_add(0, left, self.on(found[left], self.layer).tanh())
    return found


def checkpointed(self: Called, x: Tensor) -> Tensor:
    return checkpoint(self.layer, x, use_reentrant=False)


def residual(self: Called, x: Tensor) -> Tensor:
    return x + self.layer(x)


def twice(self: Called, x: Tensor) -> Tensor:
    return self.layer(self.layer(x).tanh())


def in_place(self: Called, x: Tensor) -> Tensor:
    found = self.layer(x)
    if not isinstance(self.layer, (nn.Linear, nn.LayerNorm)):
        found = found.clone()
    return found.mul_(0.5).add_(x)


def written_into(self: Called, x: Tensor) -> Tensor:
    """Every sample's result is written into its place of one tensor."""
    found = x.new_zeros(x.shape)
    for n in range(len(x)):
        found[n] = self.layer(x[n : n + 1])[0]
    return found


def routed(self: Called, x: Tensor) -> Tensor:
    """Each sample to the expert that its gate prefers."""
    shares = self.gate(x.flatten(1, -2).mean(1) if x.dim() == 3 else x).softmax(-1)
    share, choice = shares.max(-1)
    found = torch.zeros_like(x)
    for place, expert in enumerate(self.layers):
        chosen = choice == place
        weights = share[chosen].reshape(-1, *[1] * (x.dim() - 1))
        found[chosen] = self.on(x[chosen], expert) * weights
    return found


def routed_tokens(self: Called, x: Tensor) -> Tensor:
    """Each token to the two experts that its gate prefers."""
    tokens = x.flatten(0, 1)
    shares, choices = self.gate(tokens).softmax(-1).topk(2)
    found = torch.zeros_like(tokens)
    for place, expert in enumerate(self.layers):
        where, rank = (choices == place).nonzero(as_tuple=True)
        part = self.on(tokens[where], expert) * shares[where, rank][:, None]
        found = found.index_add(0, where, part)
    return found.unflatten(0, x.shape[:2])


def routed_in_order(self: Called, x: Tensor) -> Tensor:
    """Tokens are sorted by expert, and each expert sees a slice of them."""
    tokens = x.flatten(0, 1)
    choice = self.gate(tokens).argmax(-1)
    order = choice.argsort()
    parts = tokens[order].split(torch.bincount(choice, minlength=EXPERTS).tolist())
    pairs = zip(parts, self.layers, strict=True)
    found = torch.cat([self.on(part, expert) for part, expert in pairs])
    return found[order.argsort()].unflatten(0, x.shape[:2])


def masked_tokens(self: Called, x: Tensor) -> Tensor:
    chosen, found = key(x, self.towards) > 0, x.clone()
    found[chosen] = self.on(x[chosen], self.layer)
    return found


def folded(self: Called, x: Tensor) -> Tensor:
    return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def folded_positions_first(self: Called, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).transpose(0, 1)


def stacked_positions_first(self: Called, x: Tensor) -> Tensor:
    return torch.stack([self.layer(x[:, t]) for t in range(x.shape[1])]).transpose(0, 1)


def single_vectors(self: Called, x: Tensor) -> Tensor:
    vectors = x.reshape(-1, x.shape[-1]).unbind(0)
    return torch.stack([self.layer(vector) for vector in vectors]).reshape(x.shape)


Way = Callable[[Called, Tensor], Tensor]


def named(*ways: Way) -> dict[str, Way]:
    return {way.__name__.replace("_", " "): way for way in ways}


WAYS: dict[str, Way] = {
    **named(
        once, chunks, rows, permuted, sorted_by_key, flipped, both_orders, masked, masked_where,
        masked_scatter, added_to_some, row_by_row_or_not, every_other_sample, two_views,
        interleaved_views, checkpointed, residual, twice, in_place, written_into, routed,
        routed_tokens, routed_in_order, masked_tokens, folded, folded_positions_first,
    ),
    "by position": lambda self, x: torch.stack([self.layer(step) for step in x.unbind(1)], 1),
    **named(stacked_positions_first),
    "positions first": lambda self, x: self.layer(x.transpose(0, 1)).transpose(0, 1),
    **named(single_vectors),
    "single samples": lambda self, x: torch.stack([self.layer(sample) for sample in x]),
    **named(early_exit),
}  # fmt: skip

TOKEN_WAYS = {
    "routed tokens", "routed in order", "masked tokens", "folded", "folded positions first",
    "by position", "stacked positions first",
}  # fmt: skip
"""They take positions apart, so that the layer sees ``[rows, D]``."""

INNERMOST_WAYS = {"positions first", "single vectors", "single samples"}
"""The layer sees no samples in front, so that it is to be a layer of vectors itself."""


def fitting(ways: tuple[str, ...], vectors: bool, positions: bool) -> Iterator[str]:
    """Those of the ways in which a layer can be called inside one another."""
    for way in ways:
        if not vectors and way in TOKEN_WAYS | INNERMOST_WAYS:
            continue
        if not positions and way in TOKEN_WAYS | {"positions first"}:
            continue
        yield way
        if way in INNERMOST_WAYS:
            return
        positions = positions and way not in TOKEN_WAYS


# Entries.


def frames(x: Tensor, convolution: nn.Module) -> Tensor:
    """A convolution of images, samples folded with positions."""
    folded_in = x.flatten(0, 1)
    images = folded_in[:, None, :, None] * folded_in[:, None, None, :]
    return convolution(images).mean((2, 3)).unflatten(0, x.shape[:2])


def scaled_integers(ids: Tensor, layer: nn.Module) -> Tensor:
    return layer((ids / 255.0)[..., None].to(layer.weight.dtype))


def one_hot(ids: Tensor, layer: nn.Module) -> Tensor:
    return layer(F.one_hot(ids, VOCABULARY).to(layer.weight.dtype))


def offsets_bag(ids: Tensor, table: nn.Module) -> Tensor:
    """Each sample's words, as many as its first one says, in one list with offsets."""
    counts = ids[:, 0].clamp(1, ids.shape[1])
    taken = torch.arange(ids.shape[1]) < counts[:, None]
    return table(ids[taken], counts.cumsum(0) - counts)


ENTRIES: dict[str, Callable[[Sizes], nn.Module]] = {
    "features": lambda s: Written(lambda x: x),
    "linear features": linear,
    "standardised features": lambda s: Written(lambda x: (x - 0.1) / 0.5),
    "normalised features": lambda s: Written(lambda x: x / x.norm(dim=-1, keepdim=True)),
    "rounded features": lambda s: Written(lambda x: x.float().to(x.dtype)),
    "scaled integers": lambda s: Written(scaled_integers, nn.Linear(1, s.width)),
    "one-hot words": lambda s: Written(one_hot, nn.Linear(VOCABULARY, s.width)),
    "words": lambda s: nn.Embedding(VOCABULARY, s.width),
    "padded words": lambda s: nn.Embedding(VOCABULARY, s.width, padding_idx=0),
    "vectors": lambda s: Written(first_position),
    "patches": lambda s: Written(along_width, nn.Conv1d(s.width, s.width, 3, padding=1)),
    "frames": lambda s: Written(frames, nn.Conv2d(1, s.width, 2)),
    "bag": lambda s: nn.EmbeddingBag(VOCABULARY, s.width),
    "bag with offsets": lambda s: Written(
        offsets_bag, nn.EmbeddingBag(VOCABULARY, s.width, mode="sum")
    ),
}
PER_TOKEN = {
    "features", "linear features", "standardised features", "normalised features",
    "rounded features", "scaled integers", "one-hot words", "words", "padded words",
}  # fmt: skip
WITHOUT_POSITIONS = {"vectors", "bag", "bag with offsets"}
FROM_WORDS = {
    "scaled integers", "one-hot words", "words", "padded words", "bag", "bag with offsets",
}  # fmt: skip
