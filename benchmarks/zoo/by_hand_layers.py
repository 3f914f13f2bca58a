"""Layers of users: own functions, parameters used in unusual ways, networks of networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear, relu
from torch.nn.utils.parametrizations import orthogonal

from benchmarks.zoo.by_hand_losses import uncalled, ways
from benchmarks.zoo.by_hand_rows import parameter, parted
from benchmarks.zoo.losses import CLASSES, classify, numbers, regress, targets
from benchmarks.zoo.network import Batch, Network
from tests.cases.random_layers import Reversed
from tests.cases.row_cases import Net

KIND = "by hand: layers"
D = 6
H = 8


class LowNorm(nn.Module):
    """Root mean squares in float32, whatever the network computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]``."""
        low = x.float()
        return self.weight * (low * low.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x)


# Functions of a network's parts and of inputs [N, D].


def lists(model: Net, x: Tensor) -> Tensor:
    """Weights in lists and dictionaries, used by functions."""
    for weight in model.weights:
        x = x + (x @ weight).tanh()
    return linear(x, model.named["out"], model.named["bias"])


def hyper(model: Net, x: Tensor) -> Tensor:
    """Each sample's weights come out of a network of that sample."""
    weights = model.generator(x).view(-1, D, H) / D
    return model.head((x[:, None] @ weights)[:, 0].tanh())


def generated(model: Net, x: Tensor) -> Tensor:
    """Weights for all samples come out of a network of a few parameters."""
    weight = model.generator(model.code).view(H, D)
    return model.head(linear(x, weight).tanh())


def called(model: Net, x: Tensor) -> Tensor:
    """A network called with weights that are mixtures of two others'."""
    other = dict(model.b.named_parameters())
    mixed = {n: model.mixture * p + other[n] for n, p in model.a.named_parameters()}
    return model.head(functional_call(nn.Linear(D, H), mixed, (x,)).tanh())


def capsules(model: Net, x: Tensor) -> Tensor:
    """Capsules that agree by three rounds of routing."""
    votes = torch.einsum("nid,ikde->nike", model.inside(x).view(-1, 4, 3), model.weight)
    scores = x.new_zeros(votes.shape[:3])
    for _ in range(3):
        output = (scores.softmax(2)[..., None] * votes).sum(1)
        size = output.square().sum(-1, keepdim=True)
        output = output * size.sqrt() / (1 + size)
        scores = scores + (votes * output[:, None]).sum(-1)
    return output.square().sum(-1)


def equilibrium(model: Net, x: Tensor) -> Tensor:
    """A layer applied until not much changes, and once with its gradient."""
    inside = model.inside(x)
    with torch.no_grad():
        state = torch.zeros_like(inside)
        for _ in range(8):
            state = (inside + 0.5 * model.again(state)).tanh()
    return model.head((inside + 0.5 * model.again(state)).tanh())


def modulated(model: Net, x: Tensor) -> Tensor:
    """One part of the inputs scales and shifts what another part gives."""
    body, condition = x.split([4, 2], 1)
    scale, shift = model.condition(condition).chunk(2, 1)
    return model.head(relu(model.body(body) * (1 + scale) + shift))


def butterfly(model: Net, x: Tensor) -> Tensor:
    """Two block-diagonal matrices with a permutation between them (Monarch)."""
    x = torch.einsum("nki,kij->nkj", x.view(-1, 3, 2), model.left).transpose(1, 2)
    return model.head(torch.einsum("nki,kij->nkj", x, model.right).flatten(1))


def tensorised(model: Net, x: Tensor) -> Tensor:
    """A weight that is a product of small tensors."""
    x = x.view(-1, 2, 3)
    return model.head(torch.einsum("nij,iar,rjb->nab", x, model.a, model.b).flatten(1))


def force(model: Net, x: Tensor) -> Tensor:
    """Minus the gradient of an energy by the inputs."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model.net(x).sum(), x, create_graph=True)[0]


def bilinear(model: Net, x: Tensor) -> Tensor:
    """Products of two views of the inputs."""
    return model.head(model.layer(*x.split([4, 2], 1)).tanh())


def complex_weights(model: Net, x: Tensor) -> Tensor:
    """Weights of complex numbers."""
    weight = torch.view_as_complex(model.weight)
    return model.head((x.to(weight.dtype) @ weight.T).abs())


def two_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of what the head and the other head lose."""
    hidden = model.body(batch["x"]).tanh()
    first = nn.functional.cross_entropy(model.head(hidden), batch["y"])
    second = model.domain(Reversed.apply(hidden))
    return first + 0.3 * nn.functional.cross_entropy(second, 2 - batch["y"])


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """Each sample's own loss and the square of its own gradient by the inputs."""
    x = batch["x"].detach().requires_grad_()
    each = nn.functional.cross_entropy(model(x), batch["y"], reduction="none")
    (gradient,) = torch.autograd.grad(each.sum(), x, create_graph=True)
    return (each + gradient.square().sum(1)).mean()


def _headed(*layers: Callable[[], nn.Module], width: int = H) -> Callable[[], nn.Module]:
    """Layers in a row and a head."""
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Linear(width, CLASSES))


def _lists() -> dict[str, Callable[[], Any]]:
    named = partial(torch.randn, CLASSES, D)
    return {
        "weights": lambda: nn.ParameterList(torch.randn(D, D) / 2 for _ in range(3)),
        "named": lambda: nn.ParameterDict({"out": named(), "bias": torch.zeros(CLASSES)}),
    }


def _builds() -> dict[str, Callable[[], nn.Module]]:
    """Networks of rows by their names."""
    inside, head = partial(nn.Linear, D, H), {"head": partial(nn.Linear, H, CLASSES)}
    low_rank = (partial(nn.Linear, D, 2, bias=False), partial(nn.Linear, 2, H))
    of_samples = {"generator": partial(nn.Linear, D, D * H)}
    of_all = {"code": parameter(4), "generator": partial(nn.Linear, 4, D * H)}
    voting = {"inside": partial(nn.Linear, D, 12), "weight": parameter(4, CLASSES, 3, 5)}
    film = {"body": partial(nn.Linear, 4, H), "condition": partial(nn.Linear, 2, 2 * H)}
    narrow = {"head": partial(nn.Linear, D, CLASSES)}
    return {
        "normalisation in float32": _headed(inside, LowNorm),
        "low rank": _headed(*low_rank, nn.Tanh),
        "orthogonal": _headed(lambda: orthogonal(inside()), nn.Tanh),
        "lists of parameters": parted(lists, **_lists()),
        "hypernetwork of each sample": parted(hyper, **of_samples, **head),
        "hypernetwork of all": parted(generated, **of_all, **head),
        "functional call": parted(called, a=inside, b=inside, mixture=number(0.3), **head),
        "capsules": parted(capsules, **voting),
        "equilibrium": parted(equilibrium, inside=inside, again=partial(nn.Linear, H, H), **head),
        "feature-wise modulation": parted(modulated, **film, **head),
        "block-diagonal matrices": parted(
            butterfly, left=parameter(3, 2, 2), right=parameter(2, 3, 3), **narrow
        ),
        "tensor network": parted(tensorised, a=parameter(2, 4, 3), b=parameter(3, 3, 2), **head),
        "bilinear": parted(bilinear, layer=partial(nn.Bilinear, 4, 2, H), **head),
        "complex weights": parted(complex_weights, weight=parameter(H, D, 2), **head),
    }


def number(value: float) -> Callable[[], nn.Parameter]:
    """Something that builds a parameter of one number."""
    return lambda: nn.Parameter(torch.tensor(value))


def networks() -> list[Network]:
    """All of them."""
    inside, outside = partial(nn.Linear, D, H), partial(nn.Linear, H, CLASSES)
    rows, numbers_of = numbers(4, D), targets(4, (D,), (D,))
    reversed_ = parted(uncalled, body=inside, head=outside, domain=outside)
    energy = parted(force, net=lambda: nn.Sequential(inside(), nn.Tanh(), nn.Linear(H, 1)))
    net = _headed(inside, nn.Tanh)
    return [
        *(Network(name, KIND, build, rows, classify) for name, build in _builds().items()),
        Network("gradient penalty", KIND, net, rows, penalised),
        *ways(Network("two losses, one reversed", KIND, reversed_, rows, two_losses)),
        Network("forces of an energy", KIND, energy, numbers_of, regress),
    ]
