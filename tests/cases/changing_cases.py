"""Networks in which numbers that change from step to step decide whose row is where.

Their graphs have the same structure at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.cases.row_cases import Batch, C, D, H, N, Net, T, classes, randn

STEPS = 7


def cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch[-1], reduction="none")


@dataclass(frozen=True)
class ChangingCase:
    """A network, the batch of each step, and the losses ``[N]`` of outputs and batch.

    The network is called with the batch but for its last tensor.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    losses: Callable[[Tensor, Batch], Tensor] = cross_entropy


def layers(compute: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: Net(
        compute, inner=nn.Linear(D, H), middle=nn.Linear(H, H), head=nn.Linear(H, C)
    ).double()


def with_number(values: list[float]) -> Callable[[int], Batch]:
    return lambda step: (randn(N, D), torch.tensor(values[step]), classes(N))


def sometimes(rows: int, *shape: int) -> Callable[[int], Batch]:
    """Masks that are empty at the steps that are looked at anyway."""

    def batch(step: int) -> Batch:
        mask = torch.zeros(N, *shape, dtype=torch.bool)
        mask[step % N :][:rows] = step + 1 not in (1, 2, 4)
        return randn(N, D), mask, classes(N)

    return batch


def permutation(_: int) -> Batch:
    return randn(N, D), torch.eye(N, dtype=torch.float64)[torch.randperm(N)], classes(N)


def permuted_and_back(net: Any, x: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return net.head(net.inner(x)[order].tanh()[order.argsort()])


def permuted_by_product(net: Any, x: Tensor, matrix: Tensor) -> Tensor:
    return net.head(matrix.T @ net.middle(matrix @ net.inner(x).tanh()).tanh())


def permuted_by_sparse_product(net: Any, x: Tensor, matrix: Tensor) -> Tensor:
    return net.head(torch.sparse.mm(matrix.to_sparse(), net.inner(x).tanh()))


def dispatched(net: Any, x: Tensor) -> Tensor:
    """Each of two experts gets half of the rows, by a one-hot product."""
    features = net.inner(x).flatten(0, 1)
    order = net.gate(features).detach()[:, 0].argsort()
    half = len(order) // 2
    dispatch = torch.zeros(len(order), 2, half, dtype=x.dtype)
    for expert in range(2):
        dispatch[order[expert * half :][:half], expert, torch.arange(half)] = 1
    expert_inputs = torch.einsum("tec,td->ecd", dispatch, features)
    expert_outputs = torch.einsum("ecd,edh->ech", expert_inputs, net.experts).tanh()
    mixed = torch.einsum("tec,ech->th", dispatch, expert_outputs)
    return net.head(mixed.unflatten(0, x.shape[:2]).mean(1))


def experts() -> nn.Module:
    return Net(
        dispatched,
        inner=nn.Linear(D, H),
        gate=nn.Linear(H, 2),
        experts=nn.Parameter(torch.randn(2, H, H)),
        head=nn.Linear(H, C),
    ).double()


def graphs(step: int) -> Batch:
    """Two graphs of six nodes together, as block-diagonal matrices."""
    sizes = [(3, 3), (3, 3), (2, 4), (3, 3), (1, 5), (4, 2), (5, 1)][step]
    member = torch.arange(2).repeat_interleave(torch.tensor(sizes))
    together = (member[:, None] == member).double()
    pool = (torch.arange(2)[:, None] == member).double()
    return randn(6, D), together / together.sum(1), pool, classes(2)


def graph_network(net: Any, x: Tensor, together: Tensor, pool: Tensor) -> Tensor:
    return net.head(pool @ net.middle(together @ net.inner(together @ x).relu()).tanh())


def packed(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Attention among the positions of each text."""
    features = net.inner(x)
    scores = (features @ net.middle(features).T).masked_fill(~mask, float("-inf"))
    return net.head(scores.softmax(-1) @ features)


def texts(step: int) -> Batch:
    """Texts of the same lengths, whose positions come in another order at each step."""
    member = torch.arange(N).repeat_interleave(T)[torch.randperm(N * T)]
    pool = F.one_hot(member, N).double().T / T
    return randn(N * T, D), member[:, None] == member, pool, classes(N)


def swapped(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    features = net.inner(x).tanh()
    mask = mask.reshape(*mask.shape, *[1] * (2 - mask.dim()))
    return net.head(net.middle(torch.where(mask, features.roll(1, 0), features)).tanh())


def by_length(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    order = lengths.argsort(descending=True)
    return net.head(net.inner(x[order]).tanh())[order.argsort()]


def lengths(step: int) -> Batch:
    """Those of texts that are sorted at first."""
    return randn(N, D), torch.arange(N).flip(0) if step < 2 else torch.randperm(N), classes(N)


def mixed_up(net: Any, x: Tensor, share: Tensor) -> Tensor:
    features = net.inner(x).tanh()
    return net.head(net.middle(share * features + (1 - share) * features.flip(0)).tanh())


def context(net: Any, x: Tensor, weight: Tensor) -> Tensor:
    features = net.inner(x).tanh()
    return net.head(net.middle(features + weight * features.mean(0)).tanh())


class Rolled(torch.autograd.Function):
    """Rows in another order, by an integer that nothing but the context holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: int) -> Tensor:
        ctx.shift = shift
        return x.roll(shift, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].roll(-ctx.shift, 0), None


def clamped(x: Tensor, flips: bool) -> Tensor:
    return (x.flip(0) if flips else x).clamp(min=-0.5)


def through_clamped(gradient: Tensor, x: Tensor, flips: Any) -> Tensor:
    if flips:
        return (gradient * (x.flip(0) > -0.5)).flip(0)
    return gradient * (x > -0.5)


class Elementwise(torch.autograd.Function):
    """Its backward computes each element from one element, unless a flag says otherwise."""

    flips = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, flips: bool) -> Tensor:
        ctx.flips = flips
        ctx.save_for_backward(x)
        return clamped(x, flips)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return through_clamped(gradients[0], ctx.saved_tensors[0], ctx.flips), None


class ByClass(Elementwise):
    """The same by a flag on the class."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flips: bool) -> Tensor:
        ByClass.flips = flips
        return Elementwise.forward(ctx, x, flips)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return through_clamped(gradients[0], ctx.saved_tensors[0], ByClass.flips), None


class FlippingByNumbers(Elementwise):
    """The same by a tensor."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        flag = torch.full((), float(ctx.flips)) > 0.5
        return through_clamped(gradients[0], ctx.saved_tensors[0], flag), None


class Where(Elementwise):
    """Rows come from here or there by a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return torch.where(mask, x.flip(0), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (mask,), zero = ctx.saved_tensors, torch.zeros_like(gradients[0])
        there = torch.where(mask, gradients[0], zero).flip(0)
        return torch.where(mask, zero, gradients[0]) + there, None


def by_function(function: Any) -> Callable[..., Tensor]:
    def compute(net: Any, x: Tensor, flag: Tensor) -> Tensor:
        return net.head(net.middle(function.apply(net.inner(x).tanh(), bool(flag))).tanh())

    return compute


def flipped_where(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    return net.head(net.middle(Where.apply(net.inner(x).tanh(), mask[:, None])).tanh())


def masked_residual(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Some rows are computed, and added where they belong."""
    for layer in (net.inner, net.middle):
        found = torch.zeros_like(x)
        found[mask] = layer(x[mask]).tanh()
        x, mask = x + found, x[:, 0] > 0
    return net.head(x)


def scattered_columns(net: Any, x: Tensor, _: Tensor) -> Tensor:
    values, places = net.inner(x).topk(2, 1)
    return net.head(net.middle(torch.zeros(N, H).to(x).scatter(1, places, values)).tanh())


def squares() -> nn.Module:
    return Net(masked_residual, inner=nn.Linear(H, H), middle=nn.Linear(H, H),
               head=nn.Linear(H, C)).double()  # fmt: skip


def with_mask(width: int) -> Callable[[int], Batch]:
    return lambda _: (randn(N, width), torch.rand(N) < 0.6, classes(N))


def rolled(net: Any, x: Tensor, shift: Tensor) -> Tensor:
    return net.head(Rolled.apply(net.inner(x).tanh(), int(shift)))


def added_to_a_parameter(net: Any, x: Tensor, order: Tensor) -> Tensor:
    return net.head(net.base.index_add(0, order, net.inner(x).tanh()))


def prompts() -> nn.Module:
    parts = {"inner": nn.Linear(D, H), "head": nn.Linear(H, C)}
    base = nn.Parameter(torch.randn(N, H))
    return Net(added_to_a_parameter, base=base, **parts).double()


def plain(net: Any, x: Tensor, *_: Tensor) -> Tensor:
    return net.head(net.middle(net.inner(x).tanh()).tanh())


def near_neighbours(outputs: Tensor, batch: Batch) -> Tensor:
    """A hinge, which is inactive at first."""
    differences = (outputs - outputs.roll(1, 0)).square().sum(1) - batch[1]
    return cross_entropy(outputs, batch) + differences.relu()


def largest(outputs: Tensor, batch: Batch) -> Tensor:
    """Of each class the sample that has most of it; each sample has most of one class."""
    return (outputs + batch[1]).amax(0)


def one_for_each(_: int) -> Batch:
    eye = 100 * torch.eye(C, dtype=torch.float64)
    return randn(C, D), eye[torch.randperm(C)], classes(C)


def texts_in_rows(net: Any, x: Tensor, mask: Tensor, pool: Tensor) -> Tensor:
    return pool @ packed(net, x, mask)


ROUTES: dict[str, ChangingCase] = {
    "permuted by other indices, and back": ChangingCase(
        layers(permuted_and_back), lambda _: (randn(N, D), classes(N))
    ),
    "permutation by a product": ChangingCase(layers(permuted_by_product), permutation),
    "permutation by a sparse product": ChangingCase(
        layers(permuted_by_sparse_product), permutation
    ),
    "experts by one-hot products": ChangingCase(experts, lambda _: (randn(N, T, D), classes(N))),
    "graphs by block-diagonal matrices": ChangingCase(layers(graph_network), graphs),
    "packed texts": ChangingCase(layers(texts_in_rows), texts),
    "texts by their lengths": ChangingCase(layers(by_length), lengths),
    "rows swapped": ChangingCase(layers(swapped), sometimes(2)),
    "features swapped": ChangingCase(layers(swapped), sometimes(2, H)),
    "mixup": ChangingCase(layers(mixed_up), with_number([1, 1, 0.4, 1, 0.3, 0.2, 0.6])),
    "context with a gate": ChangingCase(layers(context), with_number([0, 0, 0, 0, 0.3, 0.6, 0.9])),
    "function with an integer": ChangingCase(
        layers(rolled), lambda _: (randn(N, D), torch.randint(N, ()), classes(N))
    ),
    **{
        f"function {kind.__name__}": ChangingCase(
            layers(by_function(kind)), with_number([0, 0, 1, 0, 1, 1, 0])
        )
        for kind in (Elementwise, ByClass, FlippingByNumbers)
    },
    "function Where": ChangingCase(layers(flipped_where), with_mask(D)),
    "rows where a mask says so": ChangingCase(squares, with_mask(H)),
    "columns by their sizes": ChangingCase(layers(scattered_columns), with_mask(D)),
    "indices at a parameter": ChangingCase(
        prompts, lambda _: (randn(N, D), torch.randperm(N), classes(N))
    ),
    "hinge between neighbours": ChangingCase(
        layers(plain), with_number([100, 100, -1, 100, 100, -1, -1]), near_neighbours
    ),
    "largest of the batch": ChangingCase(layers(plain), one_for_each, largest),
}
