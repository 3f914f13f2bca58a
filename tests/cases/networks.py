"""Networks, one for each kind of layer, as data: name -> how to build the network and its input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    """``build()`` gives the model, ``inputs(n)`` a batch of n samples."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


def real(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def tokens(vocabulary: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(vocabulary, (n, *shape))


class MyLinear(nn.Linear):
    """A subclass that computes what its base class does."""


class ScaledLinear(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x) + self.weight.square().sum()


class StandardisedConv(nn.Conv2d):
    """A subclass that changes the weight inside `_conv_forward`."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight / weight.norm(), bias)


class Bias(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Gain(nn.Module):
    """A scalar parameter, and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, *, power: int = 1) -> Tensor:
        return (self.gain * x) ** power


class Branching(nn.Module):
    """Control flow that depends on the data, which vmap can't follow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(
            [row * self.weight if row.sum() > 0 else -(row * self.weight**2) for row in x.split(1)]
        )


class CalledWithKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(x=self.linear(input=x), power=2)


class UsedTwice(nn.Module):
    """One linear layer twice, the second time with another number of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)).mean(1))))


class Tied(nn.Module):
    """Embedding and output layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(x))))


class LastState(nn.Module):
    """A recurrent layer's sequence and final state, both used."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        batch_first = self.layer.batch_first
        sequence, state = self.layer(x if batch_first else x.transpose(0, 1))
        state = state[0] if isinstance(state, tuple) else state
        return (sequence if batch_first else sequence.transpose(0, 1)).mean(1) + state[-1]


class InPlace(nn.Module):
    """In-place operations right after layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += 1
        x = torch.relu_(x)
        x = self.second(x)
        x *= 2
        return x


def on_image(layer: nn.Module, *after: nn.Module) -> Callable[[], nn.Module]:
    """The layer between others, so that it isn't the first one."""
    return lambda: copy.deepcopy(nn.Sequential(Bias(1, 1, 1), layer, nn.Tanh(), *after))


def eval_mode(*layers: nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = copy.deepcopy(nn.Sequential(*layers))
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name in ("running_mean", "running_var"):
                    buffer.copy_(torch.rand_like(buffer) + 0.5)
        return model.eval()

    return build


NETWORKS: dict[str, Network] = {
    "linear": Network(lambda: nn.Linear(5, 3), real(5)),
    "linear, no bias": Network(lambda: nn.Linear(5, 3, bias=False), real(5)),
    "mlp": Network(lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), real(5)),
    "linear, sequence": Network(lambda: nn.Linear(5, 3), real(4, 5)),
    "linear, long sequence": Network(lambda: nn.Linear(2, 3), real(20, 2)),
    "linear, one position": Network(lambda: nn.Linear(30, 20), real(2, 30)),
    "linear, two more axes": Network(lambda: nn.Linear(5, 3), real(2, 3, 5)),
    "subclass of linear": Network(lambda: nn.Sequential(MyLinear(5, 3)), real(5)),
    "subclass of linear with another forward": Network(lambda: ScaledLinear(5, 3), real(5)),
    "keyword arguments": Network(CalledWithKeywords, real(5)),
    "conv1d": Network(lambda: nn.Conv1d(2, 4, 3), real(2, 8)),
    "conv1d, stride and dilation": Network(
        lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, padding=3, groups=2), real(4, 11)
    ),
    "conv2d": Network(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2)),
        real(2, 6, 5),
    ),
    "conv2d, uneven": Network(
        lambda: nn.Conv2d(4, 6, (3, 2), (2, 3), (1, 2), (1, 2), groups=2, bias=False), real(4, 8, 9)
    ),
    "conv2d, depthwise": Network(lambda: nn.Conv2d(3, 6, 3, groups=3), real(3, 5, 5)),
    "conv2d, same padding": Network(
        lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), real(2, 6, 6)
    ),
    "conv2d, valid padding": Network(lambda: nn.Conv2d(2, 3, 2, padding="valid"), real(2, 4, 4)),
    "conv2d, reflect": Network(
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), real(2, 5, 6)
    ),
    "conv2d, replicate": Network(
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), real(2, 5, 5)
    ),
    "conv2d, circular": Network(
        lambda: nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"), real(2, 5, 5)
    ),
    "subclass of conv2d with another weight": Network(
        lambda: StandardisedConv(2, 3, 3), real(2, 5, 5)
    ),
    "conv3d": Network(lambda: nn.Conv3d(2, 4, (2, 3, 2), padding=1, groups=2), real(2, 3, 4, 3)),
    "conv-transpose1d": Network(
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=3, padding=1, output_padding=2, groups=2),
        real(4, 5),
    ),
    "conv-transpose2d": Network(
        lambda: nn.ConvTranspose2d(2, 3, (3, 2), (2, 1), (1, 0), (1, 1), dilation=(1, 3)),
        real(2, 4, 3),
    ),
    "conv-transpose3d": Network(lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), real(2, 2, 3, 2)),
    "embedding": Network(lambda: nn.Embedding(7, 4), tokens(7, 5)),
    "embedding, one token": Network(lambda: nn.Embedding(7, 4), tokens(7)),
    "embedding, padding": Network(lambda: nn.Embedding(7, 4, padding_idx=-2), tokens(7, 5)),
    "layer norm": Network(lambda: nn.Sequential(Bias(1), nn.LayerNorm(5)), real(5)),
    "layer norm, sequence": Network(lambda: nn.LayerNorm(5), real(4, 5)),
    "layer norm, two axes": Network(lambda: nn.LayerNorm((4, 5)), real(3, 4, 5)),
    "layer norm, no bias": Network(lambda: nn.LayerNorm(5, bias=False), real(4, 5)),
    "rms norm": Network(lambda: nn.RMSNorm(5), real(4, 5)),
    "group norm": Network(on_image(nn.GroupNorm(2, 4)), real(4, 3, 3)),
    "batch norm 1d, eval": Network(eval_mode(nn.Linear(5, 4), nn.BatchNorm1d(4)), real(5)),
    "batch norm 2d, eval": Network(eval_mode(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)), real(2, 4, 4)),
    "batch norm 3d, eval": Network(eval_mode(nn.BatchNorm3d(3)), real(3, 2, 3, 2)),
    "bare bias": Network(lambda: Bias(5), real(4, 5)),
    "scalar parameter": Network(Gain, real(5)),
    "prelu": Network(lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(4)), real(5)),
    "instance norm": Network(on_image(nn.InstanceNorm2d(3, affine=True)), real(3, 4, 4)),
    "lstm": Network(lambda: LastState(nn.LSTM(3, 4, batch_first=True)), real(5, 3)),
    "gru, sequence first": Network(lambda: LastState(nn.GRU(3, 4)), real(5, 3)),
    "data-dependent branch": Network(Branching, real(3)),
    "module used twice": Network(UsedTwice, real(3, 4)),
    "tied weights": Network(Tied, tokens(7, 3)),
    "in-place operations": Network(InPlace, real(5)),
    "encoder layer": Network(
        lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True), real(5, 4)
    ),
}
