"""Per-sample gradients of whole networks, unchanged, against a loop over samples."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens.numerics.histograms import Counts
from gradlens.quantities import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import (
    DirectionDots,
    Gram,
    Histogram1d,
    Mean,
    Reduction,
    SquaredNorms,
    SumOfSquares,
)
from tests.cases.references import without_hooks
from tests.cases.whole_networks import (
    WHOLE_NETWORKS,
    Batch,
    WholeNetwork,
    count,
    gpt2,
    labelled_text,
    loss_inside,
)


class Reduced(SingleStepQuantity):
    """Keeps what some reductions have given, by parameter."""

    def __init__(self, *reductions: Reduction) -> None:
        super().__init__()
        self.reductions = reductions
        self.found: dict[Reduction, dict[str, Any]] = {}

    def compute(self, step: Step) -> int:
        self.found = {r: dict(step.by_parameter(r)) for r in self.reductions}
        return step.samples


def loop(network: WholeNetwork, model: nn.Module, batch: Batch, divisor: Any) -> dict[str, Tensor]:
    """gₙ ``[N, *P]`` from one backward pass for each sample."""
    model, samples = without_hooks(model), count(batch)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for n in range(samples):
        sample = {key: value[n : n + 1] for key, value in batch.items()}
        loss = network.loss(model, sample, divisor)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(gradients) for name, gradients in rows.items()}


def assert_close(found: Tensor, expected: Tensor) -> None:
    """To 1e-9 of the largest number."""
    tolerance = 1e-9 * max(float(expected.abs().max()), 1e-12)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def assert_same_counts(found: Counts, expected: Tensor, bins: int, limits: Any) -> None:
    """Elements on an edge may fall to either side."""
    values = expected.flatten().clamp(*limits)
    edges = torch.linspace(*limits, bins + 1, dtype=torch.float64)
    near = (values[:, None] - edges[1:-1]).abs().amin(1) < 1e-9
    counts = torch.histc(values, bins, *limits).long()
    assert int((found.hist - counts).abs().sum()) <= 2 * int(near.sum())
    assert int(found.hist.sum()) == values.numel()


@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
@pytest.mark.parametrize("samples", [4, pytest.param(3, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("name", WHOLE_NETWORKS)
def test_every_reduction(name: str, samples: int, reduction: Any) -> None:
    network = WHOLE_NETWORKS[name]
    torch.manual_seed(0)
    model = network.build().double()
    batch = network.batch(samples)
    divisor = network.divisor(batch) if reduction == "mean" else 1
    scale = samples if reduction == "mean" else 1
    expected = {
        key: scale * gradient for key, gradient in loop(network, model, batch, divisor).items()
    }
    direction = {key: torch.randn_like(gradient[0]) for key, gradient in expected.items()}
    histogram = Histogram1d(8, (-0.1, 0.1))
    dots = DirectionDots(direction)
    wanted = Reduced(SquaredNorms(), Gram(), dots, SumOfSquares(), Mean(), histogram)
    cockpit = gradlens.Cockpit(model, [wanted], loss_reduction=reduction)

    loss = network.loss(model, batch, divisor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a parameter without per-sample gradients warns
        with cockpit(0, loss=loss):
            loss.backward()

    found = wanted.found
    assert found[Mean()].keys() == expected.keys()
    for key, g in expected.items():
        flat = g.flatten(1)
        assert_close(found[SquaredNorms()][key], flat.square().sum(1))
        assert_close(found[Gram()][key], flat @ flat.T)
        assert_close(found[dots][key], flat @ direction[key].flatten())
        assert_close(found[SumOfSquares()][key], g.square().sum(0))
        assert_close(found[Mean()][key], g.mean(0))
        assert_same_counts(found[histogram][key], g, 8, (-0.1, 0.1))


def test_loss_inside_gpt2() -> None:
    """It casts to float32, so two ways to sum it up differ by that rounding."""
    torch.manual_seed(0)
    model = gpt2().double()
    batch = labelled_text(5)(4)
    words, labels = batch["input_ids"], batch["labels"]
    scored = (labels[:, 1:] >= 0).sum()
    inside = WholeNetwork(gpt2, labelled_text(5), loss_inside, count)
    expected = {
        name: torch.stack([rows[n] * (labels[n, 1:] >= 0).sum() / scored for n in range(4)])
        for name, rows in loop(inside, model, {"input_ids": words, "labels": labels}, 1 / 4).items()
    }
    wanted = Reduced(SquaredNorms())
    cockpit = gradlens.Cockpit(model, [wanted])
    loss = model(input_ids=words, labels=labels).loss
    with cockpit(0, loss=loss):
        loss.backward()
    assert cockpit.coverage().share == 1
    for name, rows in expected.items():
        found = wanted.found[SquaredNorms()][name]
        norms = rows.nan_to_num().flatten(1).square().sum(1)
        torch.testing.assert_close(found, norms, rtol=1e-5, atol=1e-5 * float(norms.max()))
