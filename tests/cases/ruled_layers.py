"""Layers with a rule of their own, networks of them, and rules with errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from gradlens.graph.layer_rules import LayerRule
from tests.cases.random_layers import LinearFunction
from tests.cases.row_cases import (
    C,
    D,
    H,
    N,
    Net,
    RowCase,
    classes,
    of_all,
    of_chunks,
    randn,
    sequences,
    vectors,
)


class OwnLinear(nn.Module):
    """s·(x Wᵀ) + b."""

    def __init__(self, inputs: int = D, outputs: int = H) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.scale = nn.Parameter(torch.rand(outputs) + 0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        return LinearFunction.apply(times * x, self.weight) * self.scale + self.bias


def own_linear(module: Any, inputs: tuple[Any, ...], grad_output: Tensor) -> dict[str, Tensor]:
    x, times = inputs if len(inputs) > 1 else (*inputs, 1.0)
    rows, gradient = len(x), grad_output.reshape(len(x), -1, grad_output.shape[-1])
    x = times * x.reshape(rows, -1, x.shape[-1])
    return {
        "weight": torch.einsum("rto,rti->roi", gradient * module.scale, x),
        "scale": (gradient * (x @ module.weight.T.to(x.dtype))).sum(1),
        "bias": gradient.sum(1),
    }


class Subclass(OwnLinear):
    """The same, negated."""

    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        return -super().forward(x, times)


def negated(module: Any, inputs: tuple[Any, ...], grad_output: Tensor) -> dict[str, Tensor]:
    return own_linear(module, inputs, -grad_output)


class Plain(OwnLinear):
    """A subclass that computes the same."""


class Table(nn.Module):
    """A row of a table for each index, by a rule that reads integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, D))

    def forward(self, index: Tensor) -> Tensor:
        return self.table.index_select(0, index)


def table(module: Any, inputs: tuple[Any, ...], grad_output: Tensor) -> dict[str, Tensor]:
    return {"table": F.one_hot(inputs[0], 7).to(grad_output)[:, :, None] * grad_output[:, None]}


class Normalised(OwnLinear):
    """With a normalisation over the batch inside."""

    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        return F.batch_norm(super().forward(x, times), None, None, training=True)


class Penalised(OwnLinear):
    """Keeps a penalty that is computed on the way to the output."""

    penalty: Tensor

    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        hidden = LinearFunction.apply(x, self.weight)
        self.penalty = hidden.square().sum(1)
        return hidden * self.scale + self.bias


class Pair(OwnLinear):
    """Returns two tensors, to which no rule applies."""

    def forward(self, x: Tensor, times: float = 1.0) -> Any:
        outputs = super().forward(x, times)
        return outputs, outputs.tanh()


def linear(module: Any, inputs: tuple[Any, ...], grad_output: Tensor) -> dict[str, Tensor]:
    return {"weight": grad_output[:, :, None] * inputs[0][:, None], "bias": grad_output}


def parametrised() -> nn.Module:
    """The first layer's rule gives its bias alone, since its weight is computed."""
    return nn.Sequential(weight_norm(nn.Linear(D, H)), nn.Tanh(), nn.Linear(H, C))


# What networks do with the layer.


def once(net: Any, x: Tensor) -> Tensor:
    return net.head(net.own(x).tanh())


def with_arguments(net: Any, x: Tensor) -> Tensor:
    return net.head(net.own(x, times=3.0).tanh())


def averaged(net: Any, x: Tensor) -> Tensor:
    return net.head(net.own(x).tanh().mean(1))


def twice(net: Any, x: Tensor) -> Tensor:
    return net.head(net.own(net.own(x).tanh()).tanh())


def in_chunks(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.cat([net.own(part) for part in x.split(2)]))


def of_tokens(net: Any, x: Tensor) -> Tensor:
    return net.head(net.own(x.flatten(0, 1)).unflatten(0, x.shape[:2]).tanh().mean(1))


def positions_first(net: Any, x: Tensor) -> Tensor:
    return net.head(net.own(x.transpose(0, 1)).tanh().mean(0))


def routed(net: Any, x: Tensor) -> Tensor:
    tokens = x.flatten(0, 1)
    chosen = tokens[:, 0] > 0
    found = torch.zeros(len(tokens), H, dtype=x.dtype)
    found = found.index_add(0, chosen.nonzero()[:, 0], net.own(tokens[chosen]))
    found = found.index_add(0, (~chosen).nonzero()[:, 0], net.other(tokens[~chosen]))
    return net.head(found.tanh().unflatten(0, x.shape[:2]).mean(1))


def tied_behind(net: Any, x: Tensor) -> Tensor:
    return net.head(net.own(x).tanh() + F.linear(x, net.own.weight))


def tied_in_front(net: Any, x: Tensor) -> Tensor:
    return net.head(net.own(F.linear(x, net.own.weight.T @ net.own.weight).tanh()))


def of_own_weight(net: Any, x: Tensor) -> Tensor:
    """The layer gets its own parameter as an input."""
    return net.head(x @ net.own.weight.T @ net.own(net.own.weight))


def overwritten(net: Any, x: Tensor) -> Tensor:
    x = x.clone()
    hidden = net.own(x)
    x.zero_()
    return net.head(hidden)


def penalised(net: Any, x: Tensor) -> Tensor:
    outputs = net.own(x)
    return net.head(outputs) + net.own.penalty[:, None] * torch.arange(C)


def first_of_two(net: Any, x: Tensor) -> Tensor:
    return net.head(net.own(x)[0])


def centred(net: Any, x: Tensor) -> Tensor:
    hidden = net.own(x)
    return net.head(hidden - hidden.mean(0))


def looked_up(net: Any, index: Tensor) -> Tensor:
    return net.head(net.own(index).tanh())


def with_head(compute: Any, own: type[nn.Module] = OwnLinear, **sizes: int) -> Any:
    """Builds a network of the layer and a linear one."""
    width = sizes.get("outputs", H)
    return lambda: Net(compute, own=own(**sizes), head=nn.Linear(width, C))


@dataclass(frozen=True)
class RuledCase:
    """A network with rules for some of its layers.

    ``applied`` says whether one of the rules gives gradients.
    """

    network: RowCase
    rules: Mapping[type[nn.Module], LayerRule] = field(
        default_factory=lambda: {OwnLinear: own_linear}
    )
    applied: bool = True


def refused(compute: Any, reason: str, own: type[nn.Module] = OwnLinear, **more: Any) -> RowCase:
    names = ("own.weight", "own.scale", "own.bias")
    return RowCase(with_head(compute, own), refused=names, reason=reason, **more)


SEVERAL = "some of these rows belong to several samples"

RULED_CASES = {
    "a function of the user's own": RuledCase(RowCase(with_head(once))),
    "keyword arguments": RuledCase(RowCase(with_head(with_arguments))),
    "positions": RuledCase(RowCase(with_head(averaged), sequences)),
    "integers": RuledCase(
        RowCase(
            lambda: Net(looked_up, own=Table(), head=nn.Linear(D, C)),
            lambda: (torch.randint(7, (N,)), classes(N)),
        ),
        {Table: table},
    ),
    "called twice": RuledCase(RowCase(with_head(twice, inputs=D, outputs=D))),
    "in chunks": RuledCase(RowCase(with_head(in_chunks))),
    "in chunks of the loss": RuledCase(
        RowCase(lambda: nn.Sequential(OwnLinear(D, C)), vectors, of_chunks, batch_size=N)
    ),
    "tokens": RuledCase(RowCase(with_head(of_tokens), sequences)),
    "routed tokens": RuledCase(
        RowCase(
            lambda: Net(routed, own=OwnLinear(), other=OwnLinear(), head=nn.Linear(H, C)),
            lambda: (randn(N, 6, D), classes(N)),
            alone=of_all,
        )
    ),
    "no rows": RuledCase(
        RowCase(
            lambda: Net(routed, own=OwnLinear(), other=OwnLinear(), head=nn.Linear(H, C)),
            lambda: (randn(N, 6, D).abs(), classes(N)),
            alone=of_all,
        )
    ),
    "a parametrised weight": RuledCase(RowCase(parametrised), {nn.Linear: linear}),
    "a subclass": RuledCase(RowCase(with_head(once, Plain))),
    "the nearest class": RuledCase(
        RowCase(with_head(once, Subclass)), {Subclass: negated, OwnLinear: own_linear}
    ),
    "tied to a product behind": RuledCase(RowCase(with_head(tied_behind))),
    "tied to a product in front": RuledCase(RowCase(with_head(tied_in_front))),
    "its own weight as input": RuledCase(
        RowCase(
            with_head(of_own_weight, inputs=D, outputs=H),
            refused=("own",),
            reason="several samples",
        ),
        applied=False,
    ),
    "samples meet behind": RuledCase(refused(centred, SEVERAL, alone=of_all), applied=False),
    "positions first": RuledCase(
        refused(positions_first, SEVERAL, batch=sequences, batch_size=N), applied=False
    ),
    "an overwritten input": RuledCase(refused(overwritten, "overwritten"), applied=False),
    "a penalty beside the output": RuledCase(
        RowCase(
            with_head(penalised, Penalised),
            refused=("own.weight",),
            reason="something besides its output",
        )
    ),
    "two outputs": RuledCase(RowCase(with_head(first_of_two, Pair)), applied=False),
    "a normalisation behind": RuledCase(
        RowCase(
            lambda: nn.Sequential(OwnLinear(), nn.BatchNorm1d(H).eval(), nn.Linear(H, C)),
            alone=of_all,
        )
    ),
}


# Rules with an error, and what the reason says.


def changed(**changes: Any) -> LayerRule:
    """The right rule, but for some parameters."""

    def wrong_rule(
        module: nn.Module, inputs: tuple[Any, ...], grad_output: Tensor
    ) -> Mapping[str, Tensor]:
        found = own_linear(module, inputs, grad_output)
        return found | {name: change(found[name]) for name, change in changes.items()}

    return wrong_rule


def without_bias(module: Any, inputs: tuple[Any, ...], grad_output: Tensor) -> dict[str, Tensor]:
    found = own_linear(module, inputs, grad_output)
    return {name: each for name, each in found.items() if name != "bias"}


def raising(module: Any, inputs: tuple[Any, ...], grad_output: Tensor) -> dict[str, Tensor]:
    raise ValueError("no such kernel")


OWN = ("own.weight", "own.scale", "own.bias")
WRONG_RULES: dict[str, tuple[LayerRule, tuple[str, ...], str]] = {
    "summed": (
        changed(weight=lambda rows: rows.sum(0)),
        ("own.weight",),
        r"wrong_rule for OwnLinear gives gradients of 'weight' of shape \[6, 5\], which should be "
        r"\[rows, \*parameter.shape\] = \[4, 6, 5\]; correct the rule, or remove it",
    ),
    "another factor": (
        changed(scale=lambda rows: 1.001 * rows),
        ("own.scale",),
        "'scale' that differ from autograd's by 0.001 times their norm",
    ),
    "right sum, other rows": (
        changed(weight=lambda rows: rows.flip(0)),
        ("own.weight",),
        "differ from autograd's",
    ),
    "not finite": (
        changed(bias=lambda rows: rows * torch.nan),
        ("own.bias",),
        "differ from autograd's by nan",
    ),
    "no tensor": (changed(bias=lambda rows: 0.0), ("own.bias",), "no gradients of 'bias'"),
    "a parameter without": (without_bias, ("own.bias",), "gives no gradients of 'bias'"),
    "an exception": (raising, OWN, "raising for OwnLinear raised ValueError: no such kernel"),
}
