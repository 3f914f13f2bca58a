"""Operators of every kind of layer equal their dense twins, and those a loop over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradlens
from gradlens.gradients.collect import BackwardPass, Collector
from gradlens.graph.graph import Graph
from gradlens.graph.loss import Batch, LossReduction
from gradlens.numerics.unavailable import UnavailableError
from gradlens.operators import convolution as convolution_module
from gradlens.operators import operator as operator_module
from gradlens.operators.composed import Grouped, Joined, Summed
from gradlens.operators.convolution import Convolution, Geometry
from gradlens.operators.dense import Buffer, Dense, stored
from gradlens.operators.operator import GradientOperator
from gradlens.operators.outer_products import OuterProducts
from gradlens.operators.table_rows import IndexedRows
from gradlens.samples.labels import NO_SAMPLE
from gradlens.samples.plan import Plan, RowIndex
from gradlens.samples.planner import plan_of_rows
from tests.cases.networks import NETWORKS, Network
from tests.cases.references import (
    Contribution,
    flat,
    per_sample_gradients_by_loop,
    squared_error,
)

RELATIVE = 1e-10


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    size = expected.abs().max().clamp(min=1e-3).item() if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=RELATIVE, atol=RELATIVE * size)


def assert_equals_dense_twin(operator: GradientOperator) -> None:
    """The contract of every operator."""
    dense = operator.dense()
    flat = dense.reshape(len(dense), -1)
    direction = torch.randn(operator.shape, dtype=operator.dtype)
    assert dense.shape == (operator.batch_size, *operator.shape)
    assert_close(operator.squared_norms(), flat.square().sum(1))
    assert_close(operator.gram(), flat @ flat.T)
    some = torch.arange(0, len(dense), 2)
    for other in (operator.some(some), Dense(dense[some])):
        assert_close(operator.gram(other), flat @ flat[some].T)
        assert_close(other.gram(operator), flat[some] @ flat.T)
    assert_close(operator.dot(direction), flat @ direction.flatten())
    assert_close(operator.sum(), dense.sum(0))
    weights = torch.randn(operator.batch_size, dtype=operator.dtype)
    assert_close(operator.weighted_sum(weights), torch.tensordot(weights, dense, 1))
    assert_close(operator.mean(), dense.mean(0))
    assert_deviations(operator, dense)
    assert_close(operator.sum_of_squares(), dense.square().sum(0))
    for max_bytes in (1, 300, 10**9):
        assert_pieces_equal(operator, dense, max_bytes)


def assert_deviations(operator: GradientOperator, dense: Tensor) -> None:
    """Of gradients of a network, which are far from equal."""
    flat = dense.reshape(len(dense), -1).double()
    mean, apart = flat.mean(0), flat - flat.mean(0)
    found, by_element = operator.deviations(), operator.element_deviations()
    assert_close(found.squared_norms, apart.square().sum(1))
    assert_close(found.dots, apart @ mean)
    assert_close(found.squared_mean, mean.square().sum())
    assert_close(operator.centred_gram(), apart @ apart.T)
    assert_close(by_element.mean, dense.mean(0))
    assert_close(by_element.squares, apart.square().sum(0).reshape(operator.shape))


def assert_pieces_equal(operator: GradientOperator, dense: Tensor, max_bytes: int) -> None:
    seen = torch.zeros_like(dense)
    smallest = dense[0, :1].numel() if dense.dim() > 1 else 1
    for piece in operator.pieces(max_bytes):
        bound = max(max_bytes, smallest * dense.element_size())
        assert piece.values.numel() * dense.element_size() <= bound
        index = (piece.samples, piece.rows) if dense.dim() > 1 else piece.samples
        assert_close(piece.values, dense[index])
        seen[index] += 1
    assert bool((seen == 1).all())


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's, of the forward pass
@pytest.mark.parametrize(
    ("batch_size", "reduction", "piece_bytes"),
    [(3, "mean", operator_module.PIECE_BYTES), (3, "sum", 1), (1, "mean", 1)],
    ids=["default", "tiny pieces", "one sample"],
)
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_layer(
    network: Network,
    batch_size: int,
    reduction: str,
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradlens.operators.operator.PIECE_BYTES", piece_bytes)
    torch.manual_seed(0)
    model = gradlens.extend(network.build().double())
    inputs = network.inputs(batch_size)
    with torch.no_grad():
        target = torch.randn_like(model(inputs), dtype=torch.float64)
    contribution = squared_error(target, reduction)

    with gradlens.per_sample_gradients(model, loss_reduction=reduction) as gradients:
        contribution(model(inputs), slice(None)).backward()

    scale = batch_size if reduction == "mean" else 1
    expected = per_sample_gradients_by_loop(model, inputs, contribution, scale)
    assert gradients.keys() == expected.keys()
    for name, parameter in model.named_parameters():
        assert_close(gradients[name].dense(), expected[name])
        assert_close(gradients[name].sum() / scale, parameter.grad)
        assert_equals_dense_twin(gradients[name])


def test_single_positions() -> None:
    """Of the last layer, they are the gradients of the positions' own losses."""
    torch.manual_seed(0)
    model, (samples, length) = nn.Linear(5, 4).double(), (3, 6)
    inputs, targets = torch.randn(samples, length, 5).double(), torch.randn(samples, length, 4)
    with gradlens.per_sample_gradients(model, loss_reduction="sum") as gradients:
        (model(inputs) - targets).square().sum().backward()
    operator = gradients["weight"]
    assert isinstance(operator, OuterProducts)

    expected = [
        torch.autograd.grad((model(x) - target).square().sum(), model.weight)[0]
        for x, target in zip(inputs.flatten(0, 1), targets.flatten(0, 1), strict=True)
    ]
    by_position = operator.positions()
    assert_close(by_position.dense(), torch.stack(expected))
    assert_equals_dense_twin(by_position)
    assert_close(by_position.dense().unflatten(0, (samples, length)).sum(1), operator.dense())


def test_positions_keep_their_precision() -> None:
    cell, x = nn.Linear(4, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    with gradlens.per_sample_gradients(cell) as gradients:
        cell(cell(x).tanh()).square().sum(1).mean().backward()
    eps = torch.finfo(torch.bfloat16).eps
    operator = gradients["weight"]
    assert isinstance(operator, OuterProducts)
    assert operator.eps == operator.positions().eps == eps


def classifier() -> nn.Module:
    return gradlens.extend(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double())


@pytest.mark.parametrize("extend", [gradlens.extend, lambda model: model], ids=["before", "not"])
def test_all_parameters_together(extend: Callable[[nn.Module], nn.Module]) -> None:
    model = extend(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double())
    hooks = len(model._forward_hooks)
    inputs, labels = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 2, 0])
    with gradlens.per_sample_gradients(model) as gradients:
        nn.functional.cross_entropy(model(inputs), labels).backward()
    rows = rows_of_all(gradients)
    assert_close(gradients.norms(), rows.norm(dim=1))
    assert_close(gradients.squared_norms(), rows.square().sum(1))
    assert_close(gradients.gram(), rows @ rows.T)
    weight = gradients["0.weight"]
    assert_close(weight.norms(), weight.dense().flatten(1).norm(dim=1))
    # Hooks on its parts are for calls before the first one of the model.
    assert [len(module._forward_hooks) for module in model.modules()] == [hooks, 0, 0, 0]


def gradients_of(model: nn.Module, inputs: Tensor) -> gradlens.per_sample_gradients:
    with gradlens.per_sample_gradients(model) as gradients:
        model(inputs).square().flatten(1).sum(1).mean().backward()
    return gradients


def rows_of_all(gradients: gradlens.per_sample_gradients) -> Tensor:
    return flat({name: each.dense() for name, each in gradients.items()})


ACROSS = ["mlp", "linear, sequence", "linear, long sequence", "conv2d", "conv2d, depthwise"]
ACROSS += ["embedding", "layer norm, sequence", "prelu", "lstm", "module used twice"]
ACROSS += ["tied weights", "data-dependent branch", "scalar parameter"]
"""All kinds of operators."""


@pytest.mark.parametrize("name", ACROSS)
def test_products_between_batches(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = NETWORKS[name].build().double(), NETWORKS[name].inputs
    train, validation = gradients_of(model, inputs(5)), gradients_of(model, inputs(2))
    rows, others = rows_of_all(train), rows_of_all(validation)
    assert_close(train.gram(validation), rows @ others.T)
    assert_close(validation.gram(train), others @ rows.T)
    assert_close(train.gram(train), train.gram())
    mean = {name: each.mean() for name, each in validation.items()}
    assert_close(train.dot(mean), train.gram(validation).mean(1))
    one = next(iter(mean))
    assert_close(train.dot({one: mean[one]}), train[one].dot(mean[one]))


def test_products_between_sequences_of_other_lengths_and_precisions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 3), nn.Linear(3, 4)).double()
    short, long = (gradients_of(model, torch.randint(50, shape)) for shape in ((4, 2), (3, 9)))
    assert_close(short.gram(long), rows_of_all(short) @ rows_of_all(long).T)
    # The rows of a table that one batch has and the other doesn't.
    apart = gradients_of(model, torch.tensor([[0]])), gradients_of(model, torch.tensor([[1]]))
    assert not apart[0]["0.weight"].gram(apart[1]["0.weight"]).any()
    single = gradients_of(model.float(), torch.randint(50, (4, 2)))
    products = rows_of_all(single).double() @ rows_of_all(long).T
    torch.testing.assert_close(single.gram(long), products, rtol=1e-5, atol=1e-5)


def test_norms_of_some_parameters_are_not_those_of_all() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
    with gradlens.per_sample_gradients(model) as gradients:
        model[0](torch.randn(6, 5)).square().sum(1).mean().backward()
    with pytest.raises(UnavailableError, match=r"no per-sample gradients of '1\.weight'"):
        gradients.norms()


def assert_gradients(
    model: nn.Module,
    inputs: Tensor,
    loss: Tensor,
    contribution: Contribution,
    reduction: LossReduction = "mean",
) -> None:
    with gradlens.per_sample_gradients(model, reduction) as gradients:
        loss.backward()
    scale = len(inputs) if reduction == "mean" else 1
    expected = per_sample_gradients_by_loop(model, inputs, contribution, scale)
    assert gradients.keys() == expected.keys()
    for name in expected:
        assert_close(gradients[name].dense(), expected[name])


def test_repeated_frequencies_in_embedding() -> None:
    """`scale_grad_by_freq` divides by counts in the batch, which the shares must contain."""
    model = gradlens.extend(nn.Embedding(5, 3, scale_grad_by_freq=True).double())
    inputs = torch.tensor([[0, 1, 1], [1, 2, 0], [4, 4, 4]])
    with gradlens.per_sample_gradients(model, loss_reduction="sum") as gradients:
        model(inputs).square().sum().backward()
    assert_close(gradients["weight"].sum(), model.weight.grad)
    frequency = torch.tensor([2, 3, 1, 1, 3])[inputs]
    by_token = 2 * model.weight.detach()[inputs] / frequency[..., None]
    for n, row in enumerate(inputs):
        expected = torch.zeros(5, 3, dtype=torch.float64).index_add(0, row, by_token[n])
        assert_close(gradients["weight"].dense()[n], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_single(dtype: torch.dtype) -> None:
    model = gradlens.extend(nn.Linear(64, 32).to(dtype))
    with gradlens.per_sample_gradients(model, loss_reduction="sum") as gradients:
        model(300 * torch.ones(2, 64, dtype=dtype)).sum().backward()
    operator = gradients["weight"]
    assert operator.dtype == torch.float32
    # 64 * 32 * 300² is far beyond the largest float16.
    assert operator.squared_norms().tolist() == [64 * 32 * 300.0**2] * 2


def test_several_backward_passes_are_refused() -> None:
    """Their samples may be others."""
    model = classifier()
    with gradlens.per_sample_gradients(model) as gradients:
        for samples in (3, 2):
            model(torch.randn(samples, 5, dtype=torch.float64)).square().mean().backward()
    assert not gradients
    with pytest.raises(KeyError, match="from two backward passes inside one context"):
        gradients["0.weight"]


def test_graph_for_second_derivatives_is_left_alone() -> None:
    model = classifier()
    loss = model(torch.randn(3, 5, dtype=torch.float64)).square().mean()
    with gradlens.per_sample_gradients(model, loss=loss) as gradients:
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    assert not gradients["0.weight"].squared_norms().requires_grad
    assert all(gradient.requires_grad for gradient in first)
    for name, gradient in zip(gradients, first, strict=True):
        assert_close(gradients[name].mean(), gradient.detach())


def test_a_backward_pass_that_the_context_cannot_see() -> None:
    model = classifier()
    loss = model(torch.randn(3, 5, dtype=torch.float64)).square().mean()
    with gradlens.per_sample_gradients(model) as gradients:
        torch.autograd.grad(loss, list(model.parameters()))
    with pytest.raises(KeyError, match="the loss wasn't passed to the context"):
        gradients["0.weight"]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60)
def test_convolution_of_any_geometry(data: st.DataObject) -> None:
    """Any dimension, kernel, stride, dilation, padding and groups, transposed or not."""
    draw = data.draw
    space, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    transposed = draw(st.booleans())

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(space))

    kernel, stride, dilation, padding = each(1, 3), each(1, 3), each(1, 2), each(0, 2)
    kind = getattr(nn, ("ConvTranspose" if transposed else "Conv") + f"{space}d")
    arguments: dict[str, Any] = {
        "kernel_size": kernel, "stride": stride, "dilation": dilation, "padding": padding,
    }  # fmt: skip
    if transposed:
        most = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
        arguments["output_padding"] = tuple(draw(st.integers(0, limit)) for limit in most)
    layer = kind(2 * groups, groups, groups=groups, **arguments).double()
    inputs = torch.randn(2, 2 * groups, *each(5, 7), dtype=torch.float64)
    with torch.no_grad():
        target = torch.randn_like(layer(inputs))
    contribution = squared_error(target, "sum")
    assert_gradients(
        gradlens.extend(layer),
        inputs,
        contribution(layer(inputs), slice(None)),
        contribution,
        "sum",
    )


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
def test_sum_of_outer_products_of_any_size(n: int, s: int, r: int, k: int) -> None:
    """Both ways to norms and Gram matrices, whichever is cheaper."""
    delta = torch.randn(n, s, r, dtype=torch.float64)
    inputs = torch.randn(n, s, k, dtype=torch.float64)
    operator = OuterProducts(delta, inputs, scale=0.5)
    assert_close(operator.dense(), 0.5 * torch.einsum("nsr,nsk->nrk", delta, inputs))
    assert_equals_dense_twin(operator)


@pytest.mark.parametrize("name", ACROSS)
def test_joined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches as one, each times its factor."""
    monkeypatch.setattr("gradlens.operators.operator.PIECE_BYTES", 1)
    torch.manual_seed(0)
    model, inputs = NETWORKS[name].build().double(), NETWORKS[name].inputs
    parts = [dict(gradients_of(model, inputs(samples))) for samples in (2, 1)]
    for parameter in parts[0]:
        operators = [part[parameter] for part in parts]
        joined = Joined(operators, [0.5, 3.0])
        expected = [f * o.dense() for f, o in zip((0.5, 3.0), operators, strict=True)]
        assert_close(joined.dense(), torch.cat(expected))
        assert_equals_dense_twin(joined)


@pytest.mark.parametrize("name", ACROSS)
def test_grouped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of six as two samples of three rows each."""
    monkeypatch.setattr("gradlens.operators.operator.PIECE_BYTES", 1)
    torch.manual_seed(0)
    model, inputs = NETWORKS[name].build().double(), NETWORKS[name].inputs
    for operator in gradients_of(model, inputs(6)).values():
        grouped = Grouped(operator, 3)
        rows = operator.dense()
        assert_close(grouped.dense(), torch.stack([rows[:3].sum(0), rows[3:].sum(0)]))
        assert_equals_dense_twin(grouped)


class Folded(nn.Module):
    """A layer that gets each sample's frames as rows of their own, by frame if ``turned``."""

    def __init__(self, layer: nn.Module, turned: bool) -> None:
        super().__init__()
        self.layer, self.turned = layer, turned

    def forward(self, x: Tensor) -> Tensor:
        """``[N, F, ...] -> [N, ...]``."""
        frames = x.shape[1]
        if self.turned:
            rows = self.layer(x.transpose(0, 1).flatten(0, 1))
            return rows.unflatten(0, (frames, len(x))).sum(0)
        return self.layer(x.flatten(0, 1)).unflatten(0, (len(x), frames)).sum(1)


FOLDED = ["linear", "linear, sequence", "conv2d, uneven", "conv-transpose2d", "embedding"]
FOLDED += ["layer norm, sequence", "group norm", "batch norm 2d, eval", "bare bias", "prelu"]


@pytest.mark.parametrize("turned", [False, True], ids=["frames last", "frames first"])
@pytest.mark.parametrize("name", FOLDED)
def test_layers_on_several_rows_of_each_sample(name: str, turned: bool) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]
    model = gradlens.extend(Folded(network.build(), turned).double())
    inputs = network.inputs(6).unflatten(0, (2, 3))
    with torch.no_grad():
        target = torch.randn_like(model(inputs), dtype=torch.float64)
    contribution = squared_error(target, "mean")
    loss = contribution(model(inputs), slice(None))
    assert_gradients(model, inputs, loss, contribution)


LABELS: dict[str, tuple[list[int], tuple[int, ...]]] = {
    "in order": ([0, 1, 2], (3,)),
    "several rows each": ([0, 0, 1, 1, 2, 2], (6,)),
    "positions": ([0, 0, 1, 1, 2, 2], (3, 2)),
    "positions first": ([0, 1, 2, 0, 1, 2], (2, 3)),
    "in the middle": ([0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2], (2, 3, 2)),
    "permuted": ([2, 0, 1], (3,)),
    "permuted, several rows each": ([2, 0, 1, 1, 0, 2], (6,)),
    "permuted in two axes": ([2, 0, 1, 1, 0, 2], (2, 3)),
    "irregular": ([0, 2, 2, 1, 2, 0], (6,)),
    "irregular, in two axes": ([0, 2, 2, 1, 2, 0], (3, 2)),
    "a sample without rows": ([0, 2, 2, 0], (4,)),
    "rows of no sample": ([1, NO_SAMPLE, 0, 2, NO_SAMPLE], (5,)),
    "rows of no sample among others in order": ([0, 0, NO_SAMPLE, 1, 2, NO_SAMPLE], (6,)),
    "as many rows of each, and of no sample": ([0, NO_SAMPLE, 1, NO_SAMPLE, 2, NO_SAMPLE], (3, 2)),
    "of no sample at all": ([NO_SAMPLE] * 4, (4,)),
    "no rows": ([], (0,)),
}


def index_of(name: str) -> RowIndex:
    labels, shape = LABELS[name]
    return RowIndex(torch.tensor(labels, dtype=torch.long).reshape(shape), 3)


def rows_of(index: RowIndex, values: Tensor, sample: int) -> Tensor:
    """One after the other, ``[rows, ...]``."""
    flat = values.flatten(0, index.labels.dim() - 1)
    owners = index.labels.flatten().tolist()
    rows = [flat[row] for row, owner in enumerate(owners) if owner == sample]
    return torch.stack(rows) if rows else flat.new_zeros(0, *flat.shape[1:])


def assert_splits(index: RowIndex) -> None:
    """Against a loop over samples, with values of one more axis and of none."""
    for rest in ((4,), ()):
        values = torch.randn(*index.labels.shape, *rest, dtype=torch.float64)
        own = [rows_of(index, values, sample) for sample in range(index.samples)]
        split = index.split(values)
        assert split.shape == (index.samples, max(map(len, own)), *rest)
        for found, expected in zip(split, own, strict=True):
            assert torch.equal(found[: len(expected)], expected)
            assert not found[len(expected) :].any()
        assert_close(index.sum(values), torch.stack([rows.sum(0) for rows in own]))


@pytest.mark.parametrize("name", LABELS)
def test_rows_of_samples(name: str) -> None:
    torch.manual_seed(0)
    index = index_of(name)
    assert_splits(index)
    flat = index.labels.flatten().tolist()
    assert index.owners == sorted(set(flat) - {NO_SAMPLE})
    assert index.is_complete == (NO_SAMPLE not in flat)
    for sample in range(3):
        assert torch.equal(index.of_sample(sample, torch.device("cpu")), index.labels == sample)


@pytest.mark.slow
@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_rows_of_any_samples(samples: int, shape: list[int], data: st.DataObject) -> None:
    rows = torch.Size(shape).numel()
    drawn = data.draw(st.lists(st.integers(NO_SAMPLE, samples - 1), min_size=rows, max_size=rows))
    index = RowIndex(torch.tensor(drawn).reshape(shape), samples)
    assert_splits(index)
    filled = index.filled().labels
    known = index.labels != NO_SAMPLE
    assert torch.equal(filled[known], index.labels[known])


@pytest.mark.parametrize(
    ("samples", "labels", "filled"),
    [
        (3, [0, 0, 1, NO_SAMPLE, 2, 2], [0, 0, 1, 1, 2, 2]),
        (3, [0, 1, 2, NO_SAMPLE, 1, 2], [0, 1, 2, 0, 1, 2]),
        (3, [[0, NO_SAMPLE], [1, 1], [NO_SAMPLE, 2]], [[0, 0], [1, 1], [2, 2]]),
        (2, [0, NO_SAMPLE, 1, NO_SAMPLE], [0, 0, 1, 1]),
        # A sample is missing, no order is left, more than one is, rows aren't as many for each.
        (3, [0, 0, 1, 1, NO_SAMPLE, NO_SAMPLE], [0, 0, 1, 1, NO_SAMPLE, NO_SAMPLE]),
        (3, [0, 2, 1, NO_SAMPLE, 1, 2], [0, 2, 1, NO_SAMPLE, 1, 2]),
        (2, [0, NO_SAMPLE, NO_SAMPLE, 1], [0, NO_SAMPLE, NO_SAMPLE, 1]),
        (3, [0, 1, 2, NO_SAMPLE], [0, 1, 2, NO_SAMPLE]),
    ],
)
def test_rows_without_gradient_are_given_to_whom_their_places_say(
    samples: int, labels: list[Any], filled: list[Any]
) -> None:
    assert RowIndex(torch.tensor(labels), samples).filled().labels.tolist() == filled


PARTS = ["linear", "linear, sequence", "conv2d", "embedding", "prelu", "lstm", "tied weights"]


@pytest.mark.parametrize("kept", [[4, 0, 3], [0, 2, 4], [1, 5], [0, 1, 2, 3, 5], [3]], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_some_of_the_samples(name: str, kept: list[int]) -> None:
    """A plan for a part of the batch gives the gradients of these samples, in their order."""
    torch.manual_seed(0)
    model = NETWORKS[name].build().double()
    outputs = model(NETWORKS[name].inputs(6))
    parameters = dict(model.named_parameters())
    plan = plan_of_rows(Graph(outputs), parameters, 6)
    assert not plan.unavailable
    whole = operators(plan, outputs, parameters)
    part = operators(plan.part(torch.tensor(kept)), outputs, parameters)
    for parameter_name, parameter in parameters.items():
        gradient = torch.autograd.grad(outputs, parameter, outputs.detach(), retain_graph=True)[0]
        assert_close(whole[parameter_name].sum(), gradient)
        assert_close(part[parameter_name].dense(), whole[parameter_name].dense()[kept])


def operators(
    plan: Plan, outputs: Tensor, parameters: dict[str, nn.Parameter]
) -> dict[str, GradientOperator]:
    """Of a backward pass that starts from the outputs themselves."""
    collector, batch = Collector({}), Batch(plan.samples, plan.known_by, "sum")
    BackwardPass(Graph(outputs), plan, batch, collector).run(outputs.detach())
    found = {name: collector.take(name) for name in parameters}
    return {name: operator for name, operator in found.items() if operator is not None}


def convolution(scale: float) -> Convolution:
    inputs = torch.randn(7, 4, 6, 6, dtype=torch.float64)
    delta = torch.randn(7, 5, 4, 4, dtype=torch.float64)
    return Convolution(delta, inputs, Geometry((3, 3), (1, 1), (1, 1), 1), scale)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("piece_bytes", [1, operator_module.PIECE_BYTES])
def test_convolutions_of_few_positions(
    piece_bytes: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose norms go through pairs of them."""
    monkeypatch.setattr("gradlens.operators.operator.PIECE_BYTES", piece_bytes)
    torch.manual_seed(0)
    inputs = torch.randn(3, 8, 5, 4, dtype=torch.float64)
    delta = torch.randn(3, 10, 3, 1, dtype=torch.float64)
    geometry = Geometry((2, 3), (1, 2), (2, 1), groups)
    assert_equals_dense_twin(Convolution(delta, inputs, geometry, 3.0))


@pytest.mark.parametrize("patches_bytes", [1, 3_000, convolution_module.PATCHES_BYTES])
def test_stored_gradients(patches_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones of a buffer take the place of those before."""
    monkeypatch.setattr(convolution_module, "PATCHES_BYTES", patches_bytes)
    monkeypatch.setattr("gradlens.operators.dense.REUSED_BYTES", 0)
    torch.manual_seed(0)
    buffer = Buffer()
    for scale in (7.0, 1.0):
        for positions in (3, 50):
            delta, inputs = (torch.randn(7, positions, k, dtype=torch.float64) for k in (20, 30))
            for operator in (convolution(scale), OuterProducts(delta, inputs, scale)):
                found = stored(operator, buffer)
                assert_close(found.dense(), operator.dense())
                pieces = torch.cat([piece.values for piece in operator.pieces()])
                assert_close(found.dense(), pieces)
                assert_equals_dense_twin(found)
    again = stored(operator, buffer)
    assert again.dense().data_ptr() != found.dense().data_ptr()
    assert again._gradients.data_ptr() == found._gradients.data_ptr()


@pytest.mark.parametrize("positions", [1, 3])
def test_deviations_by_pairs(positions: int) -> None:
    """Where they are cheaper; however small the mean is, beside what it is the mean of."""
    torch.manual_seed(0)
    factors = torch.randn(3, positions, 40), torch.randn(3, positions, 50)
    double = [factor.double() for factor in factors]
    operator = OuterProducts(*double, 3.0)
    assert operator.has_cheap_deviations
    assert_equals_dense_twin(operator)

    delta, inputs = (torch.cat([factor, factor]) for factor in factors)
    delta[3:] *= -1 - 1e-5
    exact = OuterProducts(delta.double(), inputs.double()).dense().flatten(1)
    found = OuterProducts(delta, inputs).deviations()
    mean = exact.mean(0)
    torch.testing.assert_close(found.squared_mean, mean.square().sum(), rtol=1e-5, atol=0)
    expected = (exact - mean) @ mean
    torch.testing.assert_close(found.dots, expected, rtol=1e-5, atol=0)


def test_structure_is_kept_where_there_is_a_rule() -> None:
    """The expensive fallback would pass all other tests as well."""
    expected = {
        "linear": OuterProducts,
        "linear, sequence": OuterProducts,
        "subclass of linear": OuterProducts,
        "subclass of linear with another forward": Summed,
        "conv2d, circular": Convolution,
        "conv-transpose2d": Convolution,
        "embedding": IndexedRows,
        "layer norm": Dense,
        "group norm": Dense,
        "batch norm 2d, eval": Dense,
        "rms norm": Dense,
        "lstm": OuterProducts,
        "tied weights": Summed,
    }
    for name, kind in expected.items():
        model = gradlens.extend(NETWORKS[name].build().double())
        with gradlens.per_sample_gradients(model) as gradients:
            model(NETWORKS[name].inputs(2)).square().mean().backward()
        assert kind in {type(operator) for operator in gradients.values()}, name
