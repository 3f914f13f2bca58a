"""Every quantity against a slow reference, written from its formula on dense gradients."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import quantities
from gradlens.numerics.formulas import noise_scale
from gradlens.per_sample.operators.dense import Dense
from gradlens.quantities import Quantity
from gradlens.quantities.bin_adaptation import GradAbsMax, ParamAbsMax
from tests.cases.networks import NETWORKS
from tests.cases.references import flat, per_sample_gradients_by_loop, squared_error


@dataclass(frozen=True)
class Truth:
    """What is known of a step: dense per-sample gradients, in float64."""

    model: nn.Module
    gradients: dict[str, Tensor]
    loss: float

    @property
    def rows(self) -> np.ndarray:
        """``[N, D]``"""
        return flat(self.gradients).numpy()

    @property
    def parameters(self) -> np.ndarray:
        """``[D]``"""
        return np.concatenate([p.detach().numpy().ravel() for p in self.model.parameters()])


def norm_test(truth: Truth) -> float:
    g = truth.rows
    n, mean = len(g), g.mean(0)
    variance = ((g - mean) ** 2).sum() / (n - 1)
    return math.sqrt(variance / n / (mean @ mean))


def inner_test(truth: Truth) -> float:
    g = truth.rows
    n, mean = len(g), g.mean(0)
    return math.sqrt(np.var(g @ mean, ddof=1) / n / (mean @ mean) ** 2)


def ortho_test(truth: Truth) -> float:
    g = truth.rows
    n, mean = len(g), g.mean(0)
    across = g - np.outer(g @ mean, mean) / (mean @ mean)
    return math.sqrt((across**2).sum() / (n - 1) / n / (mean @ mean))


def mean_gsnr(truth: Truth) -> float:
    g = truth.rows
    return float((g.mean(0) ** 2 / (g.var(0) + 1e-5)).mean())


def spectrum(g: np.ndarray, k: int) -> dict[str, Any]:
    covariance = np.atleast_2d(np.cov(g.T))
    eigenvalues = np.linalg.eigvalsh(covariance)[::-1].clip(min=0)
    p = eigenvalues / eigenvalues.sum()
    padded = np.concatenate([eigenvalues, np.zeros(k)])[:k]
    return {
        "eigenvalues": list(padded),
        "trace": np.trace(covariance),
        "stable_rank": np.trace(covariance) / eigenvalues[0],
        "effective_rank": np.exp(-sum(x * np.log(x) for x in p if x > 0)),
    }


def grad_covariance(truth: Truth, k: int = 5) -> dict[str, Any]:
    layers: dict[str, list[np.ndarray]] = {}
    for name, gradient in truth.gradients.items():
        layer = name.rpartition(".")[0] or name
        layers.setdefault(layer, []).append(gradient.flatten(1).numpy())
    by_layer = {name: spectrum(np.concatenate(rows, 1), k) for name, rows in layers.items()}
    return {**spectrum(truth.rows, k), "layers": by_layer}


def counts_1d(g: np.ndarray, bins: int, range_: tuple[float, float]) -> dict[str, Any]:
    hist, _ = np.histogram(g.clip(*range_), bins, range_)
    below, above = (g < range_[0]).sum(), (g > range_[1]).sum()
    return {"hist": hist, "below": below, "above": above, "nan": 0}


def grad_hist_1d(bins: int, range_: tuple[float, float], each: bool) -> Callable[[Truth], Any]:
    def reference(truth: Truth) -> dict[str, Any]:
        edges = np.linspace(*range_, bins + 1)
        record = {**counts_1d(truth.rows, bins, range_), "edges": edges}
        if each:
            record["parameters"] = {
                name: counts_1d(g.numpy(), bins, range_) for name, g in truth.gradients.items()
            }
        return record

    return reference


def grad_hist_2d(bins: tuple[int, int], range_: Any) -> Callable[[Truth], Any]:
    def reference(truth: Truth) -> dict[str, Any]:
        x = truth.rows.ravel()
        y = np.tile(truth.parameters, len(truth.rows))
        hist, *edges = np.histogram2d(x.clip(*range_[0]), y.clip(*range_[1]), bins, range_)
        below = [(x < range_[0][0]).sum(), (y < range_[1][0]).sum()]
        above = [(x > range_[0][1]).sum(), (y > range_[1][1]).sum()]
        return {"hist": hist, "edges": edges, "below": below, "above": above, "nan": 0}

    return reference


def grad_noise_scale(truth: Truth) -> dict[str, float]:
    g = truth.rows
    n, mean = len(g), g.mean(0)
    trace = ((g - mean) ** 2).sum() / (n - 1)
    products = g @ g.T
    squared_norm = (products.sum() - np.trace(products)) / (n * (n - 1))
    # The interval's coverage has a test of its own.
    return {"trace": trace, "squared_norm": squared_norm}


def grad_norm(truth: Truth) -> dict[str, float]:
    return {n: p.grad.norm().item() for n, p in truth.model.named_parameters()}


def parameters(truth: Truth) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy() for name, p in truth.model.named_parameters()}


NARROW = ((-0.05, 0.02), (-0.1, 0.3))

CASES: dict[str, tuple[Callable[[], Quantity], Callable[[Truth], Any]]] = {
    "Loss": (quantities.Loss, lambda truth: truth.loss),
    "Parameters": (quantities.Parameters, parameters),
    "GradNorm": (quantities.GradNorm, grad_norm),
    "NormTest": (quantities.NormTest, norm_test),
    "InnerTest": (quantities.InnerTest, inner_test),
    "OrthoTest": (quantities.OrthoTest, ortho_test),
    "GradNoiseScale": (quantities.GradNoiseScale, grad_noise_scale),
    "MeanGSNR": (quantities.MeanGSNR, mean_gsnr),
    "GradCovariance": (quantities.GradCovariance, grad_covariance),
    "GradCovariance, one": (
        lambda: quantities.GradCovariance(k=1),
        lambda truth: grad_covariance(truth, 1),
    ),
    "GradHist1d": (quantities.GradHist1d, grad_hist_1d(100, (-2, 2), each=False)),
    "GradHist1d, many bins": (
        lambda: quantities.GradHist1d(bins=1000, range=(-0.05, 0.02), keep_individual=True),
        grad_hist_1d(1000, (-0.05, 0.02), each=True),
    ),
    "GradHist2d": (quantities.GradHist2d, grad_hist_2d((40, 50), ((-1, 1), (-2, 2)))),
    "GradHist2d, narrow": (
        lambda: quantities.GradHist2d(bins=(7, 300), range=NARROW),
        grad_hist_2d((7, 300), NARROW),
    ),
}
WITHOUT_FORMULA = {"Time"}
IN_UPDATES = {"Alpha", "CABS", "Distance", "EarlyStopping", "UpdateSize"}
"""Tested in test_update_quantities.py."""
OF_CURVATURE = {"HessEigenvalues", "HessMaxEV", "SpectralDensity", "Stability"}
"""Tested in test_curvature_quantities.py."""
OF_DIAGONALS = {"HessTrace", "TICDiag", "TICTrace"}
"""Tested in test_diagonals.py."""
ABSTRACT = {name for name in quantities.__all__ if name.endswith("Quantity")} | {"Phase"}
OF_LAYERS = {
    n
    for n in set(quantities.__all__) - {"Phase"}
    if getattr(quantities, n).choose is not quantities.Quantity.choose
}
"""Tested in test_layer_quantities.py."""
SOME_NETWORKS = ["mlp", "conv2d", "linear, sequence", "tied weights", "module used twice", "lstm"]


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)


def track(
    quantity: Quantity, network: str, reduction: str, batch_size: int = 6, steps: int = 1
) -> tuple[Any, Truth]:
    torch.manual_seed(0)
    model = NETWORKS[network].build().double()
    inputs = NETWORKS[network].inputs(batch_size)
    target = torch.randn_like(model(inputs)).detach()
    contribution = squared_error(target, reduction)
    cockpit = gradlens.Cockpit(model, [quantity], loss_reduction=reduction)
    for step in range(steps):
        model.zero_grad()
        loss = contribution(model(inputs), slice(None))
        with cockpit(step, loss=loss):
            loss.backward()
    scale = batch_size if reduction == "mean" else 1
    gradients = per_sample_gradients_by_loop(model, inputs, contribution, scale)
    assert not cockpit.history.notes
    return cockpit.history[quantity.name][steps - 1], Truth(model, gradients, loss.item())


@pytest.mark.parametrize("steps", [1, 2], ids=["first step", "later step"])
@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
@pytest.mark.parametrize("network", SOME_NETWORKS)
@pytest.mark.parametrize("case", CASES)
def test_quantity(case: str, network: str, reduction: str, steps: int) -> None:
    build, reference = CASES[case]
    found, truth = track(build(), network, reduction, steps=steps)
    expected = reference(truth)
    if case == "GradNoiseScale":
        ratio = expected["trace"] / expected["squared_norm"]
        value = found.pop("value")
        assert value == pytest.approx(ratio) if ratio > 0 else "zero" in value.reason
        assert 0 <= found.pop("low") <= max(ratio, 0) <= found.pop("high") or ratio < 0
        found.pop("high", None)
    assert_same(found, expected)


def test_every_public_quantity_has_a_reference() -> None:
    here = {type(build()).__name__ for build, _ in CASES.values()}
    elsewhere = IN_UPDATES | OF_CURVATURE | OF_DIAGONALS | (OF_LAYERS - ABSTRACT) | WITHOUT_FORMULA
    assert set(quantities.__all__) - ABSTRACT == here | elsewhere


def test_time_is_between_before_and_after() -> None:
    before = time.time()
    found, _ = track(quantities.Time(), "mlp", "mean")
    assert before <= found <= time.time()


@pytest.mark.parametrize(
    "quantity",
    [
        quantities.NormTest(),
        quantities.InnerTest(),
        quantities.OrthoTest(),
        quantities.MeanGSNR(),
    ],
    ids=lambda quantity: quantity.name,
)
def test_one_sample_is_undefined_with_a_reason(quantity: Quantity) -> None:
    found, _ = track(quantity, "mlp", "mean", batch_size=1)
    assert math.isnan(found)
    assert "N = 1" in found.reason


def test_covariance_of_one_sample_is_undefined_with_a_reason() -> None:
    found, _ = track(quantities.GradCovariance(k=2), "mlp", "mean", batch_size=1)
    for value in (*found["eigenvalues"], found["trace"], found["layers"]["0"]["effective_rank"]):
        assert math.isnan(value)
        assert "N = 1" in value.reason


def zero_gradient_run(quantity: Quantity) -> Any:
    model = nn.Linear(3, 2).double()
    cockpit = gradlens.Cockpit(model, [quantity])
    loss = (model(torch.randn(4, 3, dtype=torch.float64)) * 0).mean()
    with cockpit(0, loss=loss):
        loss.backward()
    return cockpit.history[quantity.name][0]


@pytest.mark.parametrize("name", ["NormTest", "InnerTest", "OrthoTest"])
def test_zero_gradient_is_undefined_with_a_reason(name: str) -> None:
    found = zero_gradient_run(getattr(quantities, name)())
    assert math.isnan(found)
    assert found.reason == "the mean gradient is zero"


def test_covariance_of_equal_gradients_is_zero_and_has_no_rank() -> None:
    found = zero_gradient_run(quantities.GradCovariance(k=2))
    assert found["eigenvalues"] == [0, 0]
    assert found["trace"] == 0
    assert "equal" in found["stable_rank"].reason
    assert "equal" in found["layers"]["weight"]["effective_rank"].reason


@pytest.mark.parametrize("name", sorted(set(CASES) & set(quantities.__all__)))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_inputs_never_raise(name: str, bad: float) -> None:
    model = nn.Linear(3, 2)
    cockpit = gradlens.Cockpit(model, [getattr(quantities, name)()])
    inputs = torch.randn(4, 3)
    inputs[1, 2] = bad
    loss = model(inputs).square().mean()
    with warnings.catch_warnings(), cockpit(0, loss=loss):
        warnings.simplefilter("ignore")
        loss.backward()
    assert 0 in cockpit.history[name]


def test_nan_elements_are_counted_apart() -> None:
    model = nn.Linear(3, 2, bias=False).double()
    torch.nn.init.ones_(model.weight)
    histogram = quantities.GradHist1d(bins=4, range=(-1, 1))
    joint = quantities.GradHist2d(bins=(2, 2))
    cockpit = gradlens.Cockpit(model, [histogram, joint], loss_reduction="sum")
    inputs = torch.tensor([[math.nan, math.inf, -math.inf], [1.0, -1.0, 0.5]]).double()
    loss = model(inputs).sum()
    with cockpit(0, loss=loss):
        loss.backward()
    record = cockpit.history["GradHist1d"][0]
    assert (record["nan"], record["below"], record["above"]) == (2, 2, 2)
    # -Inf and -1 are in the first bin, 0.5, 1 and Inf in the last; the last includes its edge.
    assert record["hist"].tolist() == [4, 0, 0, 6]
    record = cockpit.history["GradHist2d"][0]
    assert record["nan"] == 2
    assert record["hist"].tolist() == [[0, 4], [0, 6]]


def test_ranges_adapt_from_the_next_histogram_on() -> None:
    adapting = quantities.GradHist1d(adapt=GradAbsMax(gradlens.schedules.linear(2), padding=0.5))
    found, truth = track(adapting, "mlp", "mean", steps=2)
    largest = np.abs(truth.rows).max()
    np.testing.assert_allclose(found["edges"][[0, -1]], [-1.5 * largest, 1.5 * largest])
    assert found["below"] == found["above"] == 0


def test_both_axes_of_a_joint_histogram_adapt() -> None:
    policies = (GradAbsMax(), ParamAbsMax(min_size=100.0))
    found, truth = track(quantities.GradHist2d(adapt=policies), "mlp", "sum", steps=2)
    largest = np.abs(truth.rows).max()
    np.testing.assert_allclose(found["edges"][0][-1], largest)
    np.testing.assert_allclose(found["edges"][1][-1], 50.0)


def test_adapting_alone_needs_no_histogram_at_that_step() -> None:
    quantity = quantities.GradHist1d(gradlens.schedules.linear(10, 1), adapt=GradAbsMax())
    found, truth = track(quantity, "mlp", "mean", steps=2)
    np.testing.assert_allclose(found["edges"][-1], np.abs(truth.rows).max())


def test_noise_scales_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Gaussian gradients with known tr(Σ) and ‖G‖², 100 seeds."""
    deviations = torch.linspace(0.1, 2, 30, dtype=torch.float64)
    gradient = torch.linspace(-1, 1, 30, dtype=torch.float64)
    truth = float(deviations.square().sum() / gradient.square().sum())
    inside = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(64, 30, generator=generator, dtype=torch.float64)
        g = gradient + deviations * noise
        found = noise_scale(Dense(g).deviations())
        inside += found.low <= truth <= found.high
    assert 90 <= inside <= 99


def test_noise_scale_without_signal_has_no_upper_end() -> None:
    g = torch.randn(50, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g -= g.mean(0) * 0.9
    found = noise_scale(Dense(g).deviations())
    assert "zero" in found.value.reason
    assert found.high == math.inf
