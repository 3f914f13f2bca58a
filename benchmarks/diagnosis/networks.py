"""Networks of the problems: a few families with options, and what joins layers.

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


class Residual(nn.Module):
    """The inputs plus what layers compute of them (He et al., 2016)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


# Rows.


def mlp(
    *widths: int,
    activation: Build = nn.ReLU,
    norm: Build | None = None,
    dropout: float = 0.0,
    bias: bool = True,
    wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer,
) -> nn.Sequential:
    """Linear layers, with normalisation, activation and dropout between them."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [wrap(nn.Linear(inner, outer, bias)), *([norm(outer)] if norm else [])]
        layers += [activation()]
        layers += [nn.Dropout(dropout)] if dropout else []
    linear = max(number for number, layer in enumerate(layers) if isinstance(layer, nn.Linear))
    return nn.Sequential(*layers[: linear + 1])


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
    wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer,
) -> nn.Sequential:
    """Convolutions of a side, with normalisation, activation and pooling behind each."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(channels):
        convolution = CONVOLUTIONS[dims](
            inside, outside, size, stride, size // 2, bias=norm is None
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


class Variational(nn.Module):
    """Kingma and Welling, 2014: logits of pixels, and means and variances of codes behind them."""

    def __init__(self, encode: nn.Module, decode: nn.Module) -> None:
        super().__init__()
        self.encode, self.decode = encode, decode

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.encode(x).chunk(2, 1)
        codes = mean + (variance / 2).exp() * torch.randn_like(mean)
        return torch.cat([self.decode(codes), mean, variance], 1)


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


class Attention(nn.Module):
    """Queries ``[N, Q, D]`` attend to a context ``[N, K, D]`` (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Linear(width, width)
        self.keys_and_values = nn.Linear(width, 2 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor, bias: Tensor | None = None) -> Tensor:
        """``bias`` is added to the scores ``[N, heads, Q, K]``."""
        queries = self.queries(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        pairs = self.keys_and_values(context).unflatten(2, (2, self.heads, -1))
        keys, values = pairs.permute(2, 0, 3, 1, 4)
        typed = None if bias is None else bias.to(queries.dtype)
        mixed = F.scaled_dot_product_attention(queries, keys, values, typed)
        return self.merge(mixed.transpose(1, 2).flatten(2))


class SelfAttention(nn.Module):
    """Each place ``[N, T, D]`` attends to all of them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x)


class Placed(nn.Module):
    """Adds learnt vectors of the places, behind ``tokens`` more that are learnt."""

    def __init__(self, length: int, width: int, tokens: int = 0, size: float = 0.1) -> None:
        super().__init__()
        self.position = nn.Parameter(size * torch.randn(length, width))
        self.tokens = nn.Parameter(size * torch.randn(tokens, width)) if tokens else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        return x if self.tokens is None else torch.cat([self.tokens.expand(len(x), -1, -1), x], 1)


class Causal(nn.Module):
    """Attention of each place to itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attention = heads, Attention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, torch.full((x.shape[1],) * 2, -torch.inf).triu(1))


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
