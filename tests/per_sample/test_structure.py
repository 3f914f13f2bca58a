"""Labels of rows are those of the samples whose gradient reaches them, one sample at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens.graph.graph import Graph
from gradlens.graph.passes import is_elementwise
from gradlens.samples.labels import MIXED, NO_SAMPLE, UNREADABLE, labels_of
from gradlens.samples.passages import Passages
from gradlens.samples.plan import LabelledEdge
from gradlens.samples.powers_of_two import labels_below
from gradlens.samples.structure import Structure

N, T, D = 4, 3, 5


def labels_by_samples(output: Tensor, labels: Tensor, given: Tensor) -> Tensor:
    """The label of each element of ``given``, from the gradients of one label's elements each."""
    reached = []
    for label in range(int(labels.max()) + 1):
        start = torch.randn_like(output) * (labels == label)
        (gradient,) = torch.autograd.grad(output, given, start, retain_graph=True)
        reached.append(gradient != 0)
    several = torch.stack(reached)
    found = several.long().argmax(0).masked_fill(several.sum(0) == 0, NO_SAMPLE)
    return found.masked_fill(several.sum(0) > 1, MIXED)


def structure_of(found: Tensor, base: Tensor) -> tuple[Structure, LabelledEdge]:
    """The labels below a tensor whose first axis counts the samples, and an edge of them."""
    graph = Graph(found)
    labels = torch.arange(len(found)).reshape(-1, *[1] * (found.dim() - 1))
    edge = LabelledEdge((graph.number_of(base), base.output_nr), ())
    sources = {graph.root: labels_of(labels.numpy())}
    return Structure(Passages(graph, len(found)), sources), edge


def order(length: int) -> Tensor:
    return torch.randperm(length)


def squares_of(x: Tensor) -> Tensor:
    """Matrices ``[N, D, D]`` that have inverses."""
    return x.mT @ x + 10 * torch.eye(x.shape[-1], dtype=x.dtype)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "flip": lambda x: x.flip(0),
    "flip all": lambda x: x.flip(0, 1),
    "roll": lambda x: x.roll(2, 0),
    "roll back": lambda x: x.roll((-1, 1), (0, 1)),
    "slice": lambda x: x[1:],
    "slice in steps": lambda x: x[::2],
    "select": lambda x: x[-1],
    "select, joined again": lambda x: torch.stack([x[n] for n in order(len(x))]),
    "unbound": lambda x: torch.stack([*x.unbind(0)][::-1]),
    "split": lambda x: torch.cat([*x.split(2)][::-1]),
    "split unequally": lambda x: torch.cat([*x.split([1, len(x) - 1])][::-1]),
    "indexed": lambda x: x[order(len(x))],
    "indexed by pairs": lambda x: x[torch.arange(len(x)), torch.randint(x.shape[1], (len(x),))],
    "masked": lambda x: x[torch.arange(len(x)) != 1],
    "masked elements": lambda x: x[x > x.median()][: len(x)],
    "masked_select": lambda x: x.masked_select(torch.rand(x.shape) < 0.7),
    "index_select": lambda x: x.index_select(0, order(len(x))),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, order(len(x)), x),
    "index_put": lambda x: torch.zeros_like(x).index_put((order(len(x)),), x),
    "gathered": lambda x: x.gather(0, torch.randint(len(x), x.shape)),
    "scattered": lambda x: torch.zeros_like(x).scatter_add(0, x.argsort(0), x),
    "sorted": lambda x: x.sort(0).values,
    "top-k": lambda x: x.topk(2, 0).values,
    "kthvalue": lambda x: x.kthvalue(2, 0).values,
    "take": lambda x: x.take(torch.randperm(x.numel())[:7]),
    "transposed": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(*reversed(range(x.dim()))),
    "folded": lambda x: x.reshape(-1, x.shape[-1]),
    "flat": lambda x: x.reshape(-1),
    "one more axis": lambda x: x[:, None],
    "mean of the last axis": lambda x: x.mean(-1),
    "sum of the second axis": lambda x: x.sum(1),
    "largest of the first": lambda x: x.amax(0),
    "expanded": lambda x: x[None].expand(2, *x.shape),
    "repeated": lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    "interleaved": lambda x: x.repeat_interleave(2, 0),
    "softmax": lambda x: x.softmax(-1),
    "with itself": lambda x: torch.cat([x, x.tanh()]),
    "beside itself": lambda x: torch.cat([x, x.exp()], -1),
    "added to its mean": lambda x: x + x.mean(0, keepdim=True),
    "distances": lambda x: torch.cdist(x, x.tanh()),
    "matrices solved": lambda x: torch.linalg.solve_triangular(
        squares_of(x).tril(), x.mT, upper=False
    ),
    "matrices solved from the right": lambda x: torch.linalg.solve_triangular(
        squares_of(x).triu(), x, upper=True, left=False
    ),
    "matrices inverted": lambda x: torch.linalg.inv(squares_of(x)),
    "matrices factored": lambda x: torch.linalg.cholesky(squares_of(x)),
    "distances to others": lambda x: torch.cdist(x.detach() + 1, x),
    "masked_scatter": lambda x: torch.zeros_like(x).masked_scatter(torch.rand(x.shape) < 0.7, x),
    "masked_scatter into what is repeated": lambda x: (
        x[0].tanh().masked_scatter(torch.rand(x.shape) < 0.7, x)
    ),
    "masked_select of what is repeated": lambda x: x[:1].masked_select(torch.rand(x.shape) < 0.7),
    "between neighbours": lambda x: torch.trapezoid(x, dim=-1),
    "frequencies": lambda x: torch.fft.rfft(x, dim=-1).abs(),
    "times its reverse": lambda x: x * x.flip(0),
}


@pytest.mark.slow
def test_random_operations() -> None:
    for seed in range(300):
        assert_right_operations(seed)


def assert_right_operations(seed: int) -> None:
    torch.manual_seed(seed)
    source = random.Random(seed)
    x = torch.randn(N, T, D, dtype=torch.float64, requires_grad=True)
    base = found = x * 2
    names = []
    for _ in range(source.randint(1, 4)):
        name = source.choice([*OPERATIONS])
        try:
            found = OPERATIONS[name](found)
        except (IndexError, RuntimeError, TypeError):
            continue  # of too few axes or entries
        names.append(name)
    if not found.dim() or not found.numel() or found is base:
        return
    structure, edge = structure_of(found, base)
    proven = structure.index(edge).labels
    labels = torch.arange(len(found)).reshape(-1, *[1] * (found.dim() - 1)).expand(found.shape)
    expected = labels_by_samples(found, labels, base)
    # What has no gradient may have a label, but what has one has the right one, or none.
    differ = (proven >= 0) & (proven != expected) & (expected != NO_SAMPLE)
    assert not differ.any(), (seed, names, proven[differ], expected[differ])


def test_most_is_proven() -> None:
    """Each operation alone, but for those that compute across the rows; no node is asked."""
    unproven, asked = [], []
    for name, operation in OPERATIONS.items():
        torch.manual_seed(0)
        x = torch.randn(N, T, D, dtype=torch.float64, requires_grad=True)
        base = x * 2
        structure, edge = structure_of(operation(base), base)
        if not structure.are_apart(edge):
            unproven.append(name)
        asked += [name] if structure.is_read else []
    repeated = {"masked_scatter into what is repeated", "masked_select of what is repeated"}
    assert {*asked} <= {"gathered", *repeated}
    assert {*unproven} <= {
        "added to its mean", "times its reverse", "interleaved", "with itself", "gathered",
        "distances", "expanded", "repeated", *repeated,
    }  # fmt: skip


ASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x.transpose(0, 1) @ torch.randn(T, x.shape[0], 2).to(x.dtype),
    "rows written in place": lambda x: _written(x, torch.randperm(len(x))),
    "softmax over samples": lambda x: x.softmax(0),
    "sum over samples": lambda x: x.cumsum(0),
    "spectrum": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "spectrum of the samples": lambda x: torch.fft.rfft(x, dim=0).real,
    "complex": lambda x: torch.view_as_real(x[..., :1] * torch.tensor(1 + 2j)),
    "windows": lambda x: x.unfold(1, 2, 1),
    "solution": lambda x: torch.linalg.solve(torch.eye(T).to(x.dtype) + x @ x.mT / 9, x),
    "interpolated": lambda x: nn.functional.interpolate(x, scale_factor=2, mode="linear"),
    "largest of each row": lambda x: x.max(-1).values,
    "in other order": lambda x: x[torch.randperm(len(x))],
}
"""Operations, the last of whose nodes is asked."""


def _written(x: Tensor, places: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    for n, place in enumerate(places):
        found[n] = x[place]
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("samples", [2, 5, 300])
@pytest.mark.parametrize("name", ASKED)
def test_what_one_node_does_to_rows(name: str, samples: int, dtype: torch.dtype) -> None:
    """More samples than there are factors take several calls."""
    torch.manual_seed(0)
    x = torch.randn(samples, T, D, dtype=dtype, requires_grad=True)
    try:
        output = ASKED[name](x)
    except (RuntimeError, UserWarning):
        pytest.skip("torch has no kernel")
    graph = Graph(output)
    number, place = graph.root
    labels = torch.arange(len(output)).reshape(-1, *[1] * (output.dim() - 1))
    found = labels_below(graph, number, place, labels, len(output))
    node = graph.nodes[number]
    for below, edge in zip(found, graph.children[number], strict=True):
        assert edge is None or below is not None
        if below is None or edge is None:
            continue
        reached = []
        for label in range(len(output)):
            start = torch.randn(output.shape).to(output.dtype) * (labels == label)
            handed = node(start)
            gradients = handed if isinstance(handed, tuple) else (handed,)
            reached.append(gradients[graph.children[number].index(edge)] != 0)
        several = torch.stack(reached)
        expected = several.long().argmax(0).masked_fill(several.sum(0) > 1, MIXED)
        # In low precision, some gradients cancel out by chance, and small ones can't be read.
        known = (several.sum(0) > 0) & (below != NO_SAMPLE)
        known &= (below != UNREADABLE) | (dtype != torch.float16)
        assert torch.equal(below[known], expected[known])
        assert bool((below != NO_SAMPLE)[several.sum(0) > 0].float().mean() > 0.9)


class Activation(torch.autograd.Function):
    """As those of memory-saving kernels and of tutorials."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x.clamp(min=0) * y.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y = ctx.saved_tensors
        gate = y.sigmoid()
        of_x = gradients[0] * gate
        of_x[x < 0] = 0
        return of_x, gradients[0] * x.clamp(min=0) * gate * (1 - gate)


class Clipping(Activation):
    """It isn't linear in the gradient."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].clamp(-0.1, 0.1), gradients[0]


class Centring(Activation):
    """It computes with all rows together."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] - gradients[0].mean(0), gradients[0]


@pytest.mark.parametrize(
    ("function", "expected"), [(Activation, True), (Clipping, False), (Centring, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_functions_in_python_that_keep_rows(
    function: Any, expected: bool, dtype: torch.dtype
) -> None:
    x, y = torch.randn(2, N, T, D).to(dtype).unbind()
    output = function.apply(x.requires_grad_(), y.requires_grad_())
    graph = Graph(output)
    assert is_elementwise(graph, graph.root[0]) == expected


class Sometimes(torch.autograd.Function):
    """It computes with all rows together if it is told to, or if the rows are long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_centred: bool) -> Tensor:
        ctx.is_centred = is_centred
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.is_centred or gradients[0].shape[1] > D:
            return gradients[0] - gradients[0].mean(0), None
        return gradients[0], None


@pytest.mark.parametrize("widths", [(D, D), (D, D + 1), (D + 1, D)])
@pytest.mark.parametrize("centred", [(False, False), (False, True), (True, False)])
def test_functions_of_the_same_code_that_do_other_things(
    widths: tuple[int, int], centred: tuple[bool, bool]
) -> None:
    """What one call keeps apart, another one of the same function may not."""
    first, second = nn.Linear(D, widths[0]), nn.Linear(*widths)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Any:
            h = Sometimes.apply(self.first(x), centred[0])
            return Sometimes.apply(self.second(h), centred[1])

    mix = [is_centred or width > D for is_centred, width in zip(centred, widths, strict=True)]
    model = gradlens.extend(Network())
    with gradlens.per_sample_gradients(model) as gradients:
        model(torch.randn(N, D)).square().mean().backward()
    assert ("second.weight" in gradients) == (not mix[1])
    assert ("first.weight" in gradients) == (not any(mix))
