"""Networks of the development problems: a few families with options, and what joins layers.

A network is an expression of these, such as ``stack(conv(1, 8, 16), nn.Flatten(), mlp(64, 10))``.
Samples are along the first axis, channels along the second, and features of places along the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.layers import Attention, Residual, SelfAttention

Build: TypeAlias = Callable[..., nn.Module]


def stack(*parts: nn.Module) -> nn.Sequential:
    """Layers one behind the other, those of an ``nn.Sequential`` one by one."""
    layers: list[nn.Module] = []
    for part in parts:
        layers += part if isinstance(part, nn.Sequential) else [part]
    return nn.Sequential(*layers)


def repeat(times: int, build: Callable[[], nn.Module]) -> nn.Sequential:
    """Several of a kind, one behind the other."""
    return stack(*(build() for _ in range(times)))


class Apply(nn.Module):
    """A function without parameters as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def turned() -> nn.Module:
    """Exchanges the axes 1 and 2."""
    return Apply(lambda x: x.transpose(1, 2))


def mean(*axes: int) -> nn.Module:
    """The mean over some axes."""
    return Apply(lambda x: x.mean(axes))


def largest(axis: int) -> nn.Module:
    """The largest numbers along an axis."""
    return Apply(lambda x: x.amax(axis))


def last() -> nn.Module:
    """What stands at the last place."""
    return Apply(lambda x: x[:, -1])


def columns(start: int, stop: int | None = None) -> nn.Module:
    """Some of the columns."""
    return Apply(lambda x: x[:, start:stop])


class Beside(nn.Module):
    """The outputs of several parts for the same inputs, one behind the other along an axis."""

    def __init__(self, *parts: nn.Module, axis: int = 1) -> None:
        super().__init__()
        self.parts, self.axis = nn.ModuleList(parts), axis

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], self.axis)


class Added(nn.Module):
    """The sum of the outputs of several parts."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (part(x) for part in self.parts)
        return sum(others, first)


class Gated(nn.Module):
    """The product of the outputs of two parts."""

    def __init__(self, gate: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.gating, self.value = gate, value

    def forward(self, x: Tensor) -> Tensor:
        return self.gating(x) * self.value(x)


class Each(nn.Module):
    """The same network for each of several things ``[N, K, ...]``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Again(nn.Module):
    """The same network several times, in turn or, if ``path``, with all that comes out."""

    def __init__(self, network: nn.Module, times: int, path: bool = False) -> None:
        super().__init__()
        self.network, self.times, self.path = network, times, path

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for _ in range(self.times):
            states.append(self.network(states[-1]))
        return torch.stack(states[1:], 1) if self.path else states[-1]


# Rows.


def mlp(
    *widths: int,
    activation: Build = nn.ReLU,
    norm: Build | None = None,
    dropout: float = 0.0,
    bias: bool = True,
    wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer,
    after: bool = False,
) -> nn.Sequential:
    """Linear layers, with normalisation, activation and dropout between them.

    Normalisation comes before the activation, or ``after`` it.
    """
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        between = [*([norm(outer)] if norm else []), activation()]
        layers += [wrap(nn.Linear(inner, outer, bias)), *(between[::-1] if after else between)]
        layers += [nn.Dropout(dropout)] if dropout else []
    linear = max(number for number, layer in enumerate(layers) if isinstance(layer, nn.Linear))
    return nn.Sequential(*layers[: linear + 1])


def self_normalising(*widths: int) -> nn.Module:
    """Klambauer et al., 2017."""
    network = mlp(*widths, activation=lambda: nn.Sequential(nn.SELU(), nn.AlphaDropout(0.02)))
    for layer in network:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
    return stack(*network)


class Convex(nn.Module):
    """A convex function of the inputs, by positive weights (Amos et al., 2017)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(inputs, width)
        self.weight = nn.Parameter(torch.randn(width, width) * 0.3 - 3)
        self.head_weight = nn.Parameter(torch.randn(1, width) * 0.3 - 3)
        self.head = nn.Linear(inputs, 1)
        self.activation = nn.Softplus(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.first(x))
        hidden = self.activation(F.linear(hidden, F.softplus(self.weight)) + self.second(x))
        return F.linear(hidden, F.softplus(self.head_weight)) + self.head(x)


class Mixture(nn.Module):
    """Experts whose outputs are weighted by a gate: all of them are used for each sample.

    ``look`` is what the gate alone sees of the inputs.
    """

    def __init__(
        self,
        inputs: int,
        experts: int,
        build: Callable[[], nn.Module],
        look: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.look = look or nn.Identity()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(build() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(self.look(x)).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * shares.unsqueeze(-2)).sum(-1)


# Codes.


class Codes(nn.Module):
    """Embeddings of the first columns, which are codes, beside the numbers behind them."""

    def __init__(self, counts: Iterable[int], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in counts)

    def forward(self, x: Tensor) -> Tensor:
        codes = x[:, : len(self.tables)].long().unbind(1)
        embedded = [table(code) for table, code in zip(self.tables, codes, strict=True)]
        return torch.cat([*embedded, x[:, len(self.tables) :]], 1)


# Convolutions.

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d}
POOLS: dict[int, Any] = {1: nn.MaxPool1d, 2: nn.MaxPool2d}
bn1, bn2 = nn.BatchNorm1d, nn.BatchNorm2d
groups = partial(nn.GroupNorm, 4)


def leaky() -> nn.Module:
    """A leaky rectified linear unit."""
    return nn.LeakyReLU(0.1)


def conv(
    *channels: int,
    size: int = 3,
    stride: int = 1,
    dims: int = 2,
    activation: Build = nn.ReLU,
    norm: Build | None = None,
    pool: int = 0,
    dilations: Iterable[int] = (),
    wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer,
    **options: Any,
) -> nn.Sequential:
    """Convolutions of a side, with normalisation, activation and pooling behind each."""
    layers: list[nn.Module] = []
    wide = [*dilations] or [1] * (len(channels) - 1)
    for (inside, outside), dilation in zip(pairwise(channels), wide, strict=True):
        padding = dilation * (size // 2)
        convolution = CONVOLUTIONS[dims](
            inside, outside, size, stride, padding, dilation, bias=norm is None, **options
        )
        layers += [wrap(convolution), *([norm(outside)] if norm else []), activation()]
        layers += [POOLS[dims](pool)] if pool else []
    return nn.Sequential(*layers)


def pooled(dims: int = 2, side: int = 1, most: bool = False) -> nn.Module:
    """The mean or the largest number of each channel over all places, or of parts of them."""
    means: dict[int, Any] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d}
    maxima: dict[int, Any] = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d}
    return nn.Sequential((maxima if most else means)[dims](side), nn.Flatten())


class Block(nn.Module):
    """A residual block with the activation behind the sum (He et al., 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = conv(width, width, width, norm=bn2)[:-1]
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x + self.inner(x))


def first_normalised(width: int, dims: int = 2, norm: Build = groups, act: Build = nn.SiLU) -> Any:
    """Normalisation and activation in front of each of two convolutions (He et al., 2016b)."""
    return [
        layer
        for _ in range(2)
        for layer in (norm(width), act(), CONVOLUTIONS[dims](width, width, 3, padding=1))
    ]


def bottleneck(width: int, inner: int, groups: int, act: Build = nn.ReLU, dims: int = 2) -> Any:
    """Expands or shrinks, filters channels in groups, and goes back (Xie et al., Sandler et al.)"""
    norm: Any = {1: bn1, 2: bn2}[dims]
    options: Any = {"dims": dims, "norm": norm, "activation": act}
    return [
        *conv(width, inner, size=1, **options),
        *conv(inner, inner, groups=groups, **options),
        *conv(inner, width, size=1, **options)[:-1],
    ]


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of images ``[N, C, H, W]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scaled(nn.Module):
    """Multiplies each channel by a weight that starts at a small value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def modern(width: int) -> nn.Module:
    """A block of Liu et al., 2022."""
    wide = nn.Conv2d(width, width, 5, padding=2, groups=width)
    inner = (nn.Conv2d(width, 3 * width, 1), nn.GELU(), nn.Conv2d(3 * width, width, 1))
    return Residual(wide, ChannelNorm(width), *inner, Scaled(width))


def excited(width: int, dims: int = 2) -> nn.Module:
    """Multiplies each channel by a number that depends on all of them (Hu et al., 2018)."""
    weights = mlp(width, width // 2, width, activation=nn.SiLU)
    shape = nn.Unflatten(1, (width, *[1] * dims))
    return Gated(stack(pooled(dims), weights, nn.Sigmoid(), shape), nn.Identity())


def inception(
    inside: int, each: int, sizes: Iterable[int] = (1, 3, 5), **options: Any
) -> nn.Module:
    """Convolutions of several sizes beside each other (Szegedy et al., 2015)."""
    return Beside(*(conv(inside, each, size=size, **options) for size in sizes))


def dense(inside: int, growth: int) -> nn.Module:
    """Appends new channels to those that it is given (Huang et al., 2017)."""
    inner = nn.Conv2d(inside, growth, 3, padding=1, bias=False)
    return Beside(nn.Identity(), nn.Sequential(bn2(inside), nn.ReLU(), inner))


def around(inner: nn.Module, inside: int, outside: int, dims: int = 2, down: Any = None) -> Any:
    """What a coarser view gives, from ``inside`` to ``outside`` channels at the finer one."""
    up: Any = nn.ConvTranspose1d if dims == 1 else nn.ConvTranspose2d
    return stack(down or POOLS[dims](2), inner, up(inside, outside, 2, 2))


def unet(width: int = 8, outputs: int = 3, dims: int = 2, inputs: int = 1, **options: Any) -> Any:
    """Ronneberger et al., 2015: two coarser views, with the finer ones beside them."""
    layers = partial(conv, dims=dims, **options)
    coarse = around(layers(2 * width, 4 * width), 4 * width, 2 * width, dims)
    middle = stack(layers(width, 2 * width), Beside(nn.Identity(), coarse))
    back = layers(4 * width, 2 * width)
    fine = around(stack(middle, back), 2 * width, width, dims)
    both = Beside(nn.Identity(), fine)
    final = CONVOLUTIONS[dims](width, outputs, 1)
    return stack(layers(inputs, width), both, layers(2 * width, width), final)


class Variational(nn.Module):
    """Kingma and Welling, 2014: logits of pixels, and means and variances of codes behind them."""

    def __init__(self, encode: nn.Module, decode: nn.Module) -> None:
        super().__init__()
        self.encode, self.decode = encode, decode

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.encode(x).chunk(2, 1)
        codes = mean + (variance / 2).exp() * torch.randn_like(mean)
        return torch.cat([self.decode(codes), mean, variance], 1)


class CosineHead(nn.Module):
    """Cosines of what is seen and of each class (Wang et al., 2018)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.randn(classes, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) @ F.normalize(self.classes, dim=1).T


def causal(inside: int, outside: int, size: int, dilation: int = 1, wrap: Any = None) -> nn.Module:
    """A convolution along the time that sees the past alone."""
    layer: Any = nn.Conv1d(inside, outside, size, dilation=dilation)
    pad = nn.ConstantPad1d(((size - 1) * dilation, 0), 0.0)
    return nn.Sequential(pad, wrap(layer) if wrap else layer)


def gated(width: int, dilation: int) -> nn.Module:
    """A dilated causal convolution with gated tanh units (van den Oord et al., 2016)."""
    value = stack(causal(width, width, 2, dilation), nn.Tanh())
    gate = stack(causal(width, width, 2, dilation), nn.Sigmoid())
    return Residual(Gated(gate, value), nn.Conv1d(width, width, 1))


# Recurrent networks.


class Memory(nn.Module):
    """The outputs of a recurrent network at all times ``[N, T, D]``."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int, **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(inputs, width, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.recurrent(x)
        return outputs


# Attention.


class Placed(nn.Module):
    """Adds learnt vectors of the places, behind ``tokens`` more that are learnt."""

    def __init__(self, length: int, width: int, tokens: int = 0, size: float = 0.1) -> None:
        super().__init__()
        self.position = nn.Parameter(size * torch.randn(length, width))
        self.tokens = nn.Parameter(size * torch.randn(tokens, width)) if tokens else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        return x if self.tokens is None else torch.cat([self.tokens.expand(len(x), -1, -1), x], 1)


class Biased(nn.Module):
    """Attention with a bias of each head by distance: ``causal``, ``alibi`` or ``relative``.

    Press et al., 2022, and Raffel et al., 2020, the first two of which see the past alone.
    """

    def __init__(self, width: int, heads: int, kind: str, length: int = 24) -> None:
        super().__init__()
        self.heads, self.kind = heads, kind
        self.attention = Attention(width, heads)
        self.table = nn.Embedding(2 * length + 1, heads) if kind == "relative" else None
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        distance = place - place[:, None]
        if self.table is not None:
            return self.attention(x, x, self.table(distance + self.length).permute(2, 0, 1))
        slopes = 2.0 ** -torch.arange(1, self.heads + 1) if self.kind == "alibi" else torch.zeros(1)
        bias = slopes[:, None, None] * distance
        return self.attention(x, x, bias.masked_fill(distance > 0, -torch.inf))


class Induced(nn.Module):
    """A few learnt vectors attend to what is there (Lee et al., 2019; Jaegle et al., 2021)."""

    def __init__(self, width: int, vectors: int, heads: int = 4) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(vectors, width) / width**0.5)
        self.attention = Attention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.vectors.expand(len(x), -1, -1)
        return vectors + self.attention(vectors, x)


def swish_gated(width: int) -> nn.Module:
    """A feed-forward network in which one projection gates another (Shazeer, 2020)."""
    gate = nn.Sequential(nn.Linear(width, 2 * width, bias=False), nn.SiLU())
    up = nn.Linear(width, 2 * width, bias=False)
    return nn.Sequential(Gated(gate, up), nn.Linear(2 * width, width, bias=False))


def feeding(width: int, activation: Build = nn.GELU) -> nn.Module:
    """A feed-forward network of twice the width."""
    return mlp(width, 2 * width, width, activation=activation)


def transformer(
    width: int,
    mix: Callable[[int], nn.Module],
    feed: Callable[[int], nn.Module] = feeding,
    norm: Build = nn.LayerNorm,
    layers: int = 2,
    first: bool = True,
) -> nn.Sequential:
    """Layers that mix places and then features, normalised ``first`` or behind each sum."""
    found: list[nn.Module] = []
    for _ in range(layers):
        for part in (mix(width), feed(width)):
            if first:
                found.append(Residual(*stack(norm(width), part)))
            else:
                found += [Residual(*stack(part)), norm(width)]
    return nn.Sequential(*found, *([norm(width)] if first else []))


def attention(heads: int = 4) -> Callable[[int], nn.Module]:
    """Attention of each place to all of them."""
    return lambda width: SelfAttention(width, heads)


class Tied(nn.Module):
    """A language model whose head has the weight of the embedding."""

    def __init__(self, tokens: int, width: int, layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(tokens, width), layers
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.15)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x))).transpose(1, 2)


class Encoder(nn.Module):
    """PyTorch's transformer layers."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True, **options)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


# Sets and graphs.


class Graph(nn.Module):
    """Layers that see a node and the mean of those around it (Kipf and Welling, 2017).

    Graphs are ``[nodes, nodes + features]``. Gives the nodes after each layer.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.other = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        edges, nodes = x.tensor_split([x.shape[1]], 2)
        shares, seen = edges / edges.sum(2, keepdim=True).clamp(min=1), []
        for own, other in zip(self.own, self.other, strict=True):
            nodes = self.activation(own(nodes) + other(shares.to(nodes.dtype) @ nodes))
            seen.append(nodes)
        return torch.cat(seen, 2)
