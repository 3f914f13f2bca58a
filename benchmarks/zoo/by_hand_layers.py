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
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.by_hand_losses import ways
from benchmarks.zoo.losses import CLASSES, classify, numbers, regress, targets
from benchmarks.zoo.network import Batch, Network

KIND = "by hand: layers"
D = 6
H = 8


class Square(torch.autograd.Function):
    """Squares without a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Remember the inputs."""
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Twice the inputs."""
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Product(torch.autograd.Function):
    """A linear layer with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """``[N, D]``, ``[H, D]`` and ``[H]``."""
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradients."""
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x, gradient.sum(0)


class OwnFunction(nn.Module):
    """A layer whose forward pass is a function with its own backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(H, D)), nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        return Product.apply(x, self.weight, self.bias)


class Squared(nn.Module):
    """A function without parameters as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return Square.apply(x)


class Scaled(nn.Module):
    """A scale and a shift for each feature, and one number for all."""

    def __init__(self, width: int = H) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]``."""
        return (x * self.scale + self.shift) * self.temperature


class LowNorm(nn.Module):
    """Root mean squares in float32, whatever the network computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]``."""
        low = x.float()
        return self.weight * (low * low.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x)


class Lists(nn.Module):
    """Weights in lists and dictionaries, used by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(D, D) / 2 for _ in range(3))
        self.named = nn.ParameterDict(
            {"out": torch.randn(CLASSES, D), "bias": torch.zeros(CLASSES)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        for weight in self.weights:
            x = x + (x @ weight).tanh()
        return linear(x, self.named["out"], self.named["bias"])


class TiedAutoencoder(nn.Module):
    """The decoder's weight is the encoder's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(D, H)
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        return linear(self.encoder(x).tanh(), self.encoder.weight.T, self.bias)


class Hyper(nn.Module):
    """Each sample's weights come out of a network of that sample."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.head = nn.Linear(D, D * H), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        weights = self.generator(x).view(-1, D, H) / D
        return self.head((x[:, None] @ weights)[:, 0].tanh())


class Generated(nn.Module):
    """Weights for all samples come out of a network of a few parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.generator = nn.Parameter(torch.randn(4)), nn.Linear(4, D * H)
        self.head = nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        weight = self.generator(self.code).view(H, D)
        return self.head(linear(x, weight).tanh())


class Called(nn.Module):
    """A network called with weights that are mixtures of two others'."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, H), nn.Linear(D, H)
        self.mixture, self.head = nn.Parameter(torch.tensor(0.3)), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        other = dict(self.b.named_parameters())
        mixed = {n: self.mixture * p + other[n] for n, p in self.a.named_parameters()}
        return self.head(functional_call(nn.Linear(D, H), mixed, (x,)).tanh())


class Capsules(nn.Module):
    """Capsules that agree by three rounds of routing."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(D, 4 * 3)
        self.weight = nn.Parameter(torch.randn(4, CLASSES, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        votes = torch.einsum("nid,ikde->nike", self.inside(x).view(-1, 4, 3), self.weight)
        scores = x.new_zeros(votes.shape[:3])
        for _ in range(3):
            output = (scores.softmax(2)[..., None] * votes).sum(1)
            size = output.square().sum(-1, keepdim=True)
            output = output * size.sqrt() / (1 + size)
            scores = scores + (votes * output[:, None]).sum(-1)
        return output.square().sum(-1)


class Equilibrium(nn.Module):
    """A layer applied until not much changes, and once with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.again = nn.Linear(D, H), nn.Linear(H, H)
        self.head = nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        inside = self.inside(x)
        with torch.no_grad():
            state = torch.zeros_like(inside)
            for _ in range(8):
                state = (inside + 0.5 * self.again(state)).tanh()
        return self.head((inside + 0.5 * self.again(state)).tanh())


class Film(nn.Module):
    """One part of the inputs scales and shifts what another part gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.condition = nn.Linear(4, H), nn.Linear(2, 2 * H)
        self.head = nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        body, condition = x.split([4, 2], 1)
        scale, shift = self.condition(condition).chunk(2, 1)
        return self.head(relu(self.body(body) * (1 + scale) + shift))


class Butterfly(nn.Module):
    """Two block-diagonal matrices with a permutation between them (Monarch)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Parameter(torch.randn(3, 2, 2)),
            nn.Parameter(torch.randn(2, 3, 3)),
        )
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        x = torch.einsum("nki,kij->nkj", x.view(-1, 3, 2), self.left).transpose(1, 2)
        return self.head(torch.einsum("nki,kij->nkj", x, self.right).flatten(1))


class Tensorised(nn.Module):
    """A weight that is a product of small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 4, 3)), nn.Parameter(torch.randn(3, 3, 2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        x = x.view(-1, 2, 3)
        return self.head(torch.einsum("nij,iar,rjb->nab", x, self.a, self.b).flatten(1))


class Energy(nn.Module):
    """Forces are the gradient of an energy by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, 1))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return force


class Checkpointed(nn.Module):
    """A block that is recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        return self.head(checkpoint(self.block, x, use_reentrant=False))


class Mapped(nn.Module):
    """A function of one sample, mapped over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(H, D)), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        return self.head(torch.vmap(lambda row: (self.weight @ row).tanh())(x))


class Bilinear(nn.Module):
    """Products of two views of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Bilinear(4, 2, H), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        return self.head(self.layer(*x.split([4, 2], 1)).tanh())


class InPlace(nn.Module):
    """Activations changed in place, and outputs written into slices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 4), nn.Linear(D, 4)
        self.head = nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        hidden = x.new_empty(len(x), H)
        hidden[:, :4] = self.a(x).relu_()
        hidden[:, 4:] = self.b(x).mul_(0.5)
        return self.head(hidden)


class Complex(nn.Module):
    """Weights of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(H, D, 2)
        self.weight, self.head = nn.Parameter(weight), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        weight = torch.view_as_complex(self.weight)
        return self.head((x.to(weight.dtype) @ weight.T).abs())


class Adversarial(nn.Module):
    """Two losses of one body, of which one runs backward (domain adaptation)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(D, H), nn.Linear(H, CLASSES)
        self.domain = nn.Linear(H, CLASSES)


class Reverse(torch.autograd.Function):
    """The identity, whose gradient has another sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A view."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Minus the gradient."""
        return -gradient


def two_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of what the head and the other head lose."""
    hidden = model.body(batch["x"]).tanh()
    first = nn.functional.cross_entropy(model.head(hidden), batch["y"])
    second = model.domain(Reverse.apply(hidden))
    return first + 0.3 * nn.functional.cross_entropy(second, 2 - batch["y"])


def margin(model: nn.Module, batch: Batch) -> Tensor:
    """The multi-class hinge loss."""
    return nn.functional.multi_margin_loss(model(batch["x"]), batch["y"])


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """Each sample's own loss and the square of its own gradient by the inputs."""
    x = batch["x"].detach().requires_grad_()
    each = nn.functional.cross_entropy(model(x), batch["y"], reduction="none")
    (gradient,) = torch.autograd.grad(each.sum(), x, create_graph=True)
    return (each + gradient.square().sum(1)).mean()


def _headed(*layers: Callable[[], nn.Module], width: int = H) -> Callable[[], nn.Module]:
    """Layers in a row and a head."""
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Linear(width, CLASSES))


def networks() -> list[Network]:
    """All of them."""
    inside = partial(nn.Linear, D, H)
    low_rank = (partial(nn.Linear, D, 2, bias=False), partial(nn.Linear, 2, H))
    builds: dict[str, Callable[[], nn.Module]] = {
        "own function with parameters": _headed(OwnFunction, nn.Tanh),
        "own function without": _headed(inside, Squared),
        "scales and one number": _headed(inside, Scaled, nn.Tanh),
        "normalisation in float32": _headed(inside, LowNorm),
        "low rank": _headed(*low_rank, nn.Tanh),
        "orthogonal": _headed(lambda: orthogonal(inside()), nn.Tanh),
        "lists of parameters": Lists,
        "hypernetwork of each sample": Hyper,
        "hypernetwork of all": Generated,
        "functional call": Called,
        "capsules": Capsules,
        "equilibrium": Equilibrium,
        "feature-wise modulation": Film,
        "block-diagonal matrices": Butterfly,
        "tensor network": Tensorised,
        "checkpointed": Checkpointed,
        "vmap inside": Mapped,
        "bilinear": Bilinear,
        "in place and slices": InPlace,
        "complex weights": Complex,
    }
    net = _headed(inside, nn.Tanh)
    losses = {
        "hinge loss": margin,
        "gradient penalty": penalised,
    }
    rows = numbers(4, D)
    return [
        *(Network(name, KIND, build, rows, classify) for name, build in builds.items()),
        *(Network(name, KIND, net, rows, loss) for name, loss in losses.items()),
        *ways(Network("two losses, one reversed", KIND, Adversarial, rows, two_losses)),
        Network("tied autoencoder", KIND, TiedAutoencoder, targets(4, (D,), (D,)), regress),
        Network("forces of an energy", KIND, Energy, targets(4, (D,), (D,)), regress),
    ]
