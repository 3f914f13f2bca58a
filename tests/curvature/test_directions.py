"""Directions of largest curvature equal those of dense matrices, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit, quantities
from gradlens.curvature import (
    GGNOperator,
    LowRankGGN,
    Probe,
    directional_derivatives,
    directions,
    factors,
)
from gradlens.history.undefined import Undefined
from gradlens.numerics.unavailable import UnavailableError
from gradlens.operators import composed
from tests.cases.curvature_cases import Reduction, build
from tests.cases.networks import NETWORKS
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward


@dataclass(frozen=True)
class Dense:
    """Per-sample gradients ``[N, D]`` and parts ``[N, D, D]`` of the matrix of a mean loss."""

    gradients: np.ndarray
    parts: np.ndarray

    @property
    def matrix(self) -> np.ndarray:
        return self.parts.mean(0)

    @property
    def gradient(self) -> np.ndarray:
        return self.gradients.mean(0)


def dense(outputs: Tensor, loss: Tensor, parameters: list[nn.Parameter], factor: float) -> Dense:
    """By one backward pass for each output; ``factor`` makes ℓₙ of its contribution to the loss."""
    n, size = len(outputs), outputs[0].numel()

    def gradient(of: Tensor) -> Tensor:
        found = torch.autograd.grad(of, parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in found])

    jacobian = torch.stack([gradient(each) for each in outputs.flatten()]).view(n, size, -1)
    (slopes,) = torch.autograd.grad(loss, outputs, create_graph=True)
    rows = [
        torch.autograd.grad(slope, outputs, retain_graph=True, materialize_grads=True)[0]
        for slope in slopes.flatten()
    ]
    hessian = torch.stack(rows).view(n, size, n, size)
    own = torch.stack([hessian[each, :, each] for each in range(n)])
    gradients = torch.einsum("nk,nkd->nd", slopes.detach().view(n, size), jacobian)
    parts = torch.einsum("nkd,nkl,nle->nde", jacobian, own, jacobian)
    return Dense((gradients * factor).numpy(), (parts * factor).numpy())


def assert_is(found: LowRankGGN, expected: Dense, ggn: GGNOperator) -> None:
    """All of the spectrum, and what the samples do along the vectors that are well defined."""
    spectrum = np.linalg.eigvalsh(expected.matrix)[::-1]
    zeros = np.zeros(len(spectrum) - found.rank)
    largest = spectrum[0]
    all_values = [*found.eigenvalues, *zeros]
    np.testing.assert_allclose(all_values, spectrum, rtol=1e-9, atol=1e-12 * largest)
    assert found.trace == pytest.approx(np.trace(expected.matrix), rel=1e-9)
    # Rounding of an eigenvector grows with the ratio of the largest eigenvalue to its own.
    k = int((found.eigenvalues > 1e-5 * largest).sum())
    vectors = found.eigenvectors(k)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(k), atol=1e-9)
    products = expected.matrix @ vectors
    np.testing.assert_allclose(products, vectors * found.eigenvalues[:k], atol=1e-9 * largest)
    first = expected.gradients @ vectors
    second = np.einsum("dk,nde,ek->nk", vectors, expected.parts, vectors)
    along = found.directional_derivatives(k)
    sizes = {"first": np.abs(first).max(), "second": second.max()}
    np.testing.assert_allclose(along.first, first, rtol=1e-9, atol=1e-9 * sizes["first"])
    np.testing.assert_allclose(along.second, second, rtol=1e-9, atol=1e-9 * sizes["second"])
    assert (along.first.mean(0) >= -1e-12).all()
    by_products = directional_derivatives(ggn, vectors)
    np.testing.assert_allclose(by_products.first, first, rtol=1e-9, atol=1e-9 * sizes["first"])
    np.testing.assert_allclose(by_products.second, second, rtol=1e-9, atol=1e-9 * sizes["second"])
    n = len(first)
    for ratios, values in ((along.gradient_snr, first), (along.curvature_snr, second)):
        expected_ratios = values.mean(0) ** 2 / (values.var(0, ddof=1) / n)
        np.testing.assert_allclose(ratios, expected_ratios, rtol=1e-6, atol=1e-9)
    for few in (1, k):
        inside = np.square(expected.gradient @ vectors[:, :few]).sum()
        share = inside / np.square(expected.gradient).sum()
        assert found.gradient_overlap(few) == pytest.approx(share, rel=1e-9, abs=1e-12)


def of_network(name: str, samples: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, its outputs, of which each sample has seven at most, and a convex loss of them."""
    torch.manual_seed(0)
    model = NETWORKS[name].build().double()
    outputs = model(NETWORKS[name].inputs(samples)).flatten(1)[:, :7]
    targets = torch.randn_like(outputs).detach().softmax(1)
    loss = nn.functional.cross_entropy(outputs, targets) + outputs[:, 0].exp().mean()
    return model, outputs, loss


Made = tuple[nn.Module, Tensor, Tensor, float]
"""The model, its outputs, the loss and what makes it a mean."""


def of_problem(model: str, criterion: str, reduction: Reduction = "mean") -> Made:
    problem = build(model, criterion, reduction)
    loss, outputs = problem.forward()
    return problem.model, outputs, loss, problem.mean_scale


def of_loss(criterion: nn.Module) -> Made:
    """Whose samples differ in weight."""
    problem = build("perceptron", "cross-entropy")
    outputs = problem.model(problem.inputs)
    return problem.model, outputs, criterion(outputs, torch.arange(8) % 3), 1.0


LAYERS = (
    *("mlp", "linear, sequence", "conv1d, stride and dilation", "conv2d, depthwise", "embedding"),
    *("layer norm, sequence", "batch norm 2d, eval", "data-dependent branch", "lstm"),
    "tied weights",
)
MADE: dict[str, Callable[[], Made]] = {
    "linear": lambda: of_problem("linear", "mse", "sum"),
    "perceptron": lambda: of_problem("perceptron", "mse"),
    "convolutional": lambda: of_problem("convolutional", "cross-entropy", "sum"),
    "unused": lambda: of_problem("unused", "cross-entropy"),
    "tied": lambda: of_problem("tied", "mse", "sum"),
    **{name: lambda name=name: (*of_network(name), 1.0) for name in LAYERS},
    "weighted": lambda: of_loss(nn.CrossEntropyLoss(torch.tensor([1.0, 0.2, 3.0]).double())),
    "ignored targets": lambda: of_loss(nn.CrossEntropyLoss(ignore_index=1)),
    "smoothed labels": lambda: of_loss(nn.CrossEntropyLoss(label_smoothing=0.1)),
}


@pytest.mark.parametrize("name", MADE)
def test_directions_are_those_of_dense_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in LAYERS:
        monkeypatch.setattr(composed, "BLOCK_BYTES", 1)  # one row of a weight at a time
    model, outputs, loss, scale = MADE[name]()
    parameters = dict(model.named_parameters())
    ggn = GGNOperator(loss, outputs, parameters, scale)
    expected = dense(outputs, loss, list(parameters.values()), len(outputs) * scale)
    assert_is(LowRankGGN(ggn, model), expected, ggn)


def test_the_first_eigenvectors_are_those_of_all() -> None:
    model, outputs, loss = of_network("mlp")
    found = LowRankGGN(GGNOperator(loss, outputs, dict(model.named_parameters())), model)
    more = found.rank + 5
    assert found.eigenvectors(more).shape == (found.ggn.shape[0], found.rank)
    np.testing.assert_allclose(found.eigenvectors(2), found.eigenvectors(more)[:, :2], atol=1e-12)
    assert found.directional_derivatives(more).first.shape == (3, found.rank)
    every = found.directional_derivatives(more)
    np.testing.assert_array_equal(found.directional_derivatives(2).second, every.second[:, :2])


def coupled_loss(outputs: Tensor) -> Tensor:
    return (outputs[0] * outputs[1]).sum() + outputs.square().sum()


def normalised(outputs: Tensor) -> Tensor:
    return nn.BatchNorm1d(3).double()(outputs)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "a loss of pairs": (lambda z: z, coupled_loss, "not a sum over samples"),
    "a linear loss": (lambda z: z, lambda z: z.sum(), "linear in"),
    "a loss that is not convex": (lambda z: z, lambda z: z.sin().sum(), "not convex"),
    "BatchNorm in train mode": (normalised, lambda z: z.square().sum(), "in eval mode, as on a"),
    "samples that meet": (
        lambda z: z - z.mean(0),
        lambda z: z.square().sum(),
        "no per-sample grad",
    ),
    "outputs without samples": (lambda z: z.sum(), lambda z: z.square(), "no samples"),
    "no samples": (lambda z: z[:0], lambda z: z.square().sum(), "no samples"),
    "Inf": (lambda z: z, lambda z: z.square().mean() * torch.inf, "NaN or Inf"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    change, loss_of, reason = REFUSED[case]
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    outputs = change(model(torch.randn(6, 4).double()))
    ggn = GGNOperator(loss_of(outputs), outputs, dict(model.named_parameters()))
    with pytest.raises(UnavailableError, match=reason):
        LowRankGGN(ggn, model)
    if case in ("a loss of pairs", "BatchNorm in train mode", "samples that meet", "no samples"):
        with pytest.raises(UnavailableError, match=reason):
            directional_derivatives(ggn, np.ones((15, 1)), model)


@pytest.mark.parametrize(("module", "limit"), [(directions, "MAX_COLUMNS"), (factors, "MAX_BYTES")])
def test_what_would_be_too_large_is_refused(
    module: ModuleType, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, 10)
    model, outputs, loss = of_network("mlp", 6)
    with pytest.raises(UnavailableError, match=r"more.*than"):
        LowRankGGN(GGNOperator(loss, outputs, dict(model.named_parameters())), model)


def track(
    model: nn.Module,
    inputs: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    k: int = 3,
    on: Probe | None = None,
    **options: Any,
) -> tuple[Any, list[str]]:
    """The value of one step, and the notes on it."""
    cockpit = Cockpit(model, [quantities.DirectionalDerivatives(k=k, on=on)], **options)
    outputs = model(inputs)
    tracked_backward(cockpit, 0, loss_of(outputs))
    cockpit.close()
    notes = [note.text for note in cockpit.history.notes]
    return cockpit.history["DirectionalDerivatives"][0], notes


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_quantity(reduction: Any) -> None:
    problem = build("perceptron", "cross-entropy", reduction)

    def loss_of(outputs: Tensor) -> Tensor:
        return problem.criterion(outputs, problem.targets)

    found, notes = track(problem.model, problem.inputs, loss_of, loss_reduction=reduction)
    loss, outputs = problem.forward()
    ggn = GGNOperator(loss, outputs, problem.parameters, problem.mean_scale)
    expected = LowRankGGN(ggn, problem.model)  # which is compared with dense matrices above
    along = expected.directional_derivatives(3)
    np.testing.assert_allclose(found["eigenvalues"], expected.eigenvalues[:3], rtol=1e-9)
    np.testing.assert_allclose(found["gradient"], abs(along.first.mean(0)), rtol=1e-8)
    for name in ("gradient_snr", "curvature_snr"):
        np.testing.assert_allclose(found[name], getattr(along, name), rtol=1e-8)
    assert found["overlap"] == pytest.approx(expected.gradient_overlap(3), rel=1e-9)
    assert not notes


def reasons(values: list[float]) -> set[str]:
    return {value.reason for value in values if isinstance(value, Undefined)}


def test_entries_beyond_the_rank_are_undefined() -> None:
    torch.manual_seed(0)
    found, _ = track(nn.Linear(2, 1), torch.randn(8, 2), lambda z: z.square().mean(), k=5)
    assert np.isfinite(found["eigenvalues"][:3]).all()
    assert found["overlap"] == pytest.approx(1, abs=1e-4)
    for name in ("eigenvalues", "gradient", "gradient_snr", "curvature_snr"):
        assert len(found[name]) == 5
        (reason,) = reasons(found[name][3:])
        assert "only 3 eigenvalues" in reason


def test_a_single_sample_and_a_gradient_of_zero() -> None:
    torch.manual_seed(0)
    found, _ = track(nn.Linear(2, 2), torch.randn(1, 2), lambda z: z.square().mean(), k=2)
    assert np.isfinite(found["eigenvalues"]).all()
    assert reasons(found["gradient_snr"]) == {"N = 1: a variance over samples needs two of them"}
    model, inputs = nn.Linear(2, 1), torch.randn(4, 2)
    targets = model(inputs).detach()
    found, _ = track(model, inputs, lambda z: (z - targets).square().mean(), k=1)
    assert found["overlap"].reason == "the mean gradient is zero"
    assert reasons(found["gradient_snr"]) == {"the derivatives of all samples are zero"}
    assert np.isfinite(found["curvature_snr"]).all()


@pytest.mark.filterwarnings("ignore:.*couples the samples")
def test_coupled_samples_have_directions_on_a_probe() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    inputs, targets = torch.randn(8, 4).double(), torch.randint(3, (8,))
    loss_of = nn.CrossEntropyLoss()
    found, _ = track(model, inputs, lambda z: loss_of(z, targets), k=2)
    assert "in eval mode, as on a Probe, it doesn't" in found.reason
    on = Probe([(inputs, targets)], loss_of)
    found, _ = track(model, inputs, lambda z: loss_of(z, targets), k=2, on=on)
    assert np.isfinite(found["gradient_snr"]).all()
    batches = Probe([(inputs, targets)] * 2, loss_of)
    found, _ = track(model, inputs, lambda z: loss_of(z, targets), k=2, on=batches)
    assert "single batch" in found.reason


def test_positions_of_a_sequence_are_of_one_sample() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
    words, following = torch.randint(9, (6, 10)), torch.randint(9, (6, 10))

    def loss_of(outputs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), following.flatten())

    found, _ = track(model, words, loss_of, k=2)
    outputs = model(words)
    loss = loss_of(outputs)
    ggn = GGNOperator(loss, outputs, dict(model.named_parameters()))
    values, vectors = np.linalg.eigh(ggn @ np.eye(ggn.shape[0]))
    np.testing.assert_allclose(found["eigenvalues"], values[:-3:-1], rtol=1e-6)
    derivatives = directional_derivatives(ggn, vectors[:, :-3:-1].copy(), model)
    np.testing.assert_allclose(found["curvature_snr"], derivatives.curvature_snr, rtol=1e-6)


@pytest.mark.parametrize("is_summed", [False, True])  # positions that see those before them
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1, 2)])
def test_rows_of_the_outputs_that_are_positions(
    order: tuple[int, int, int], is_summed: bool
) -> None:
    """Ratios of the variance between positions aren't those of samples."""
    torch.manual_seed(0)

    def compute(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        return net.last((hidden.cumsum(1) if is_summed else hidden).tanh()).permute(order)

    model = Net(compute, first=nn.Linear(3, 4), last=nn.Linear(4, 2)).double()
    targets = torch.randn(6, 5, 2, dtype=torch.float64).permute(order)
    inputs = torch.randn(6, 5, 3, dtype=torch.float64)
    found, _ = track(model, inputs, lambda z: (z - targets).square().mean(), k=2)
    if order[0]:
        assert "aren't its 6 samples" in found.reason
    else:
        assert np.isfinite(found["gradient_snr"]).all()


def test_no_direction_is_no_choice() -> None:
    with pytest.raises(ValueError, match="k=0 is too few"):
        quantities.DirectionalDerivatives(k=0)


def test_noise_alone_has_a_ratio_of_one_on_average() -> None:
    values = np.random.default_rng(0).standard_normal((100, 4000))
    ratios = np.array(gradlens.curvature.DirectionalDerivatives(values, values**2).gradient_snr)
    assert ratios.mean() == pytest.approx(1, abs=0.1)
    assert 0.04 < (ratios > 4).mean() < 0.06
