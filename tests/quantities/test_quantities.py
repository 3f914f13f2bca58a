"""Every quantity against a slow reference, written from its formula on dense gradients."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import quantities
from gradlens.numerics.noise_scales import noise_scale
from gradlens.operators.dense import Dense
from gradlens.quantities import Quantity
from gradlens.quantities.bin_adaptation import GradAbsMax, ParamAbsMax
from gradlens.quantities.parameter_quantity import OfParameters
from tests.cases.networks import NETWORKS
from tests.cases.records import assert_same_records, leaves
from tests.cases.references import flat, per_sample_gradients_by_loop, squared_error
from tests.cases.steps import tracked_backward


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


def by_part(reference: Callable[[Truth], Any], by: str) -> Callable[[Truth], Any]:
    """The same for the network, and for each layer or parameter from its own columns."""

    def reference_by_part(truth: Truth) -> dict[str, Any]:
        parts: dict[str, dict[str, Tensor]] = {}
        for name, gradient in truth.gradients.items():
            layer = name.rpartition(".")[0] or name
            parts.setdefault(layer if by == "layer" else name, {})[name] = gradient
        found = {name: reference(replace(truth, gradients=part)) for name, part in parts.items()}
        whole = reference(truth)
        return {**(whole if isinstance(whole, dict) else {"value": whole}), f"{by}s": found}

    return reference_by_part


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
OF_NOISE = ("NormTest", "InnerTest", "OrthoTest", "MeanGSNR", "GradNoiseScale")
CASES |= {
    f"{name} by {by}": (partial(getattr(quantities, name), by=by), by_part(CASES[name][1], by))
    for name in OF_NOISE
    for by in ("layer", "parameter")
}
ELSEWHERE = {
    "quantities/test_precision.py": "CABS EarlyStopping",
    "quantities/test_update_quantities.py": "Alpha Distance UpdateSize",
    "quantities/test_along_update.py": "CriticalSharpness StepLedger",
    "quantities/test_group_gradients.py": "GroupGradients",
    "quantities/test_curvature_quantities.py": "HessEigenvalues HessMaxEV SpectralDensity",
    "quantities/test_stability.py": "Stability",
    "quantities/test_optimizer_state.py": "ClippedGradNorm",
    "curvature/test_directions.py": "DirectionalDerivatives",
    "curvature/test_diagonals.py": "HessTrace TICDiag TICTrace",
}
"""Where quantities are tested that aren't in ``CASES``.

Those of layers and parameters are in ``test_layer_quantities.py``.
"""
SOME_NETWORKS = ["mlp", "conv2d", "linear, sequence", "tied weights", "module used twice", "lstm"]


def track(
    quantity: Quantity, network: str, reduction: str, batch_size: int = 6, steps: int = 1
) -> tuple[Any, Truth]:
    found, truth = track_all([quantity], network, reduction, batch_size, steps)
    return found[quantity.name], truth


def track_all(
    tracked: list[Quantity], network: str, reduction: str, batch_size: int = 6, steps: int = 1
) -> tuple[dict[str, Any], Truth]:
    torch.manual_seed(0)
    model = NETWORKS[network].build().double()
    inputs = NETWORKS[network].inputs(batch_size)
    target = torch.randn_like(model(inputs)).detach()
    contribution = squared_error(target, reduction)
    cockpit = gradlens.Cockpit(model, tracked, loss_reduction=reduction)
    for step in range(steps):
        model.zero_grad()
        loss = contribution(model(inputs), slice(None))
        tracked_backward(cockpit, step, loss)
    scale = batch_size if reduction == "mean" else 1
    gradients = per_sample_gradients_by_loop(model, inputs, contribution, scale)
    assert not cockpit.history.notes
    found = {quantity.name: cockpit.history[quantity.name][steps - 1] for quantity in tracked}
    return found, Truth(model, gradients, loss.item())


def named(case: str) -> Quantity:
    quantity = CASES[case][0]()
    quantity.name = case
    return quantity


def assert_right(case: str, found: Any, truth: Truth) -> None:
    found = estimates(found) if case.startswith("GradNoiseScale") else found
    assert_same_records(found, CASES[case][1](truth), rtol=1e-8)


@pytest.mark.parametrize("steps", [1, 2], ids=["first step", "later step"])
@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
@pytest.mark.parametrize("network", SOME_NETWORKS)
def test_quantities_together(network: str, reduction: str, steps: int) -> None:
    found, truth = track_all([*map(named, CASES)], network, reduction, steps=steps)
    for case, value in found.items():
        assert_right(case, value, truth)


@pytest.mark.parametrize("case", CASES)
def test_each_alone(case: str) -> None:
    assert_right(case, *track(named(case), "conv2d", "mean", steps=2))


def estimates(scale: dict[str, Any]) -> dict[str, Any]:
    """Those of a noise scale, and of its parts, whose value and interval are checked."""
    ratio = scale["trace"] / scale["squared_norm"]
    assert scale["value"] == pytest.approx(ratio) if ratio > 0 else "zero" in scale["value"].reason
    assert ratio < 0 or 0 <= scale["low"] <= ratio <= scale["high"]
    parts = {noun: scale[noun] for noun in ("layers", "parameters") if noun in scale}
    return {
        "trace": scale["trace"],
        "squared_norm": scale["squared_norm"],
        **{noun: {n: estimates(each) for n, each in part.items()} for noun, part in parts.items()},
    }


class Nested(nn.Module):
    """A parameter of its own, and layers of which one has a part without per-sample gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x) * self.scale))


def layers_of_nested(name: str, change: Callable[[Nested], None], step: int = 1) -> dict[str, Any]:
    """The last values by layer, after a change of the network before the last step."""
    torch.manual_seed(0)
    model = Nested()
    cockpit = gradlens.Cockpit(model, [getattr(quantities, name)(by="layer")])
    for number in range(step + 1):
        model.zero_grad()
        if number == step:
            change(model)
        loss = model(torch.randn(8, 4)).square().mean()
        with warnings.catch_warnings(), cockpit(number, loss=loss):
            warnings.simplefilter("ignore")
            loss.backward()
    return cockpit.history[name][step]["layers"]


def why(value: Any) -> str:
    """The reason of a NaN, which all numbers of a dict have in common; empty without any."""
    numbers = [*value.values()] if isinstance(value, dict) else [value]
    reasons = {getattr(number, "reason", "") for number in numbers}
    return reasons.pop() if len(reasons) == 1 else ""


def freeze_bias(model: Nested) -> None:
    model.one.bias.requires_grad_(False)


def freeze_layer(model: Nested) -> None:
    model.one.requires_grad_(False)


def replace_weight(model: Nested) -> None:
    model.one.weight = nn.Parameter(torch.randn(3, 4))


def add_bias_scale(model: Nested) -> None:
    model.one.extra = nn.Parameter(torch.ones(3))


def couple(model: Nested) -> None:
    """Let the samples meet in front of a layer."""
    model.one.register_forward_hook(lambda module, args, out: out / out.detach().norm() * out.sum())


@pytest.mark.parametrize("name", OF_NOISE)
def test_layers_without_per_sample_gradients_say_why(name: str) -> None:
    found = layers_of_nested(name, lambda model: None)
    assert [*found] == ["scale", "one", "two", "unused"]
    assert not any(why(found[layer]) for layer in ("scale", "one", "two"))
    assert "unused.weight has no per-sample gradients" in why(found["unused"])


@pytest.mark.parametrize("name", OF_NOISE)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (freeze_bias, ""),
        (freeze_layer, "one.weight has no per-sample gradients: .*frozen"),
        (replace_weight, "one.weight is trained and not tracked: close the cockpit"),
        (add_bias_scale, "one.extra is trained and not tracked: close the cockpit"),
        (couple, "one.weight has no per-sample gradients: "),
    ],
)
def test_a_layer_is_not_described_by_a_part_of_it(
    name: str, change: Callable[[Nested], None], reason: str
) -> None:
    found = layers_of_nested(name, change)
    assert re.match(reason or "$", why(found["one"]))
    assert not why(found["two"])


@pytest.mark.parametrize("by", ["layers", "Layer", "", None, 3])
def test_unknown_parts_are_refused(by: Any) -> None:
    with pytest.raises(ValueError, match=r"NormTest: by=.* is none of 'network', 'layer', 'para"):
        quantities.NormTest(by=by)


def test_layers_need_the_model() -> None:
    parameters = [*nn.Linear(2, 2).parameters()]
    with pytest.raises(ValueError, match=r"NormTest: .*pass the model, as in Cockpit\(model"):
        gradlens.Cockpit(parameters, [quantities.NormTest(by="layer")])
    gradlens.Cockpit(parameters, [quantities.NormTest(by="parameter")])


def test_every_public_quantity_has_a_reference() -> None:
    found = {type(build()).__name__ for build, _ in CASES.values()} | {"Time"}
    for path, names in ELSEWHERE.items():
        text = (Path(__file__).parents[1] / path).read_text("utf-8")
        found |= {name for name in names.split() if name in text}
    public = {n: getattr(quantities, n) for n in {*quantities.__all__} - {"Phase"}}
    of_layers = quantities.LayerQuantity, OfParameters
    others = {n for n, kind in public.items() if not issubclass(kind, of_layers)}
    assert {n for n in others if not n.endswith("Quantity")} == found


def test_time_is_between_before_and_after() -> None:
    before = time.time()
    found, _ = track(quantities.Time(), "mlp", "mean")
    assert before <= found <= time.time()


def test_two_samples_have_a_noise_scale_without_an_interval() -> None:
    found, truth = track(quantities.GradNoiseScale(), "mlp", "mean", batch_size=2)
    for name, value in grad_noise_scale(truth).items():
        assert found[name] == pytest.approx(value, rel=1e-8)
    for end in ("low", "high"):
        assert "three samples" in found[end].reason


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_noise_scale_of_what_is_not_finite_has_a_reason(samples: int, bad: float) -> None:
    g = torch.randn(samples, 20, dtype=torch.float64)
    g[1, 3] = bad
    found = noise_scale(Dense(g).deviations())
    for number in (found.value, found.low, found.high, found.trace, found.squared_norm):
        assert not math.isnan(number) or number.reason


NEED_TWO = ("NormTest", "InnerTest", "OrthoTest", "MeanGSNR", "EarlyStopping", "CABS", "Alpha",
            "GradCovariance", "GradNoiseScale")  # fmt: skip
"""Quantities of how samples differ."""

OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda loss: loss,
    "zero": lambda loss: 0 * loss,
    "negative": lambda loss: loss - 100,
    "large": lambda loss: 1e6 * loss,
    "small": lambda loss: 1e-6 * loss,
}


@pytest.mark.filterwarnings("ignore::gradlens.GradlensWarning")
@pytest.mark.parametrize("change", OF_ONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_sample_is_the_reason_whatever_its_loss_is(change: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    of_parts = [getattr(quantities, n)(by="layer", name=f"{n} by layer") for n in NEED_TWO[:4]]
    chosen = [*(getattr(quantities, name)() for name in NEED_TWO), *of_parts]
    cockpit = gradlens.Cockpit(model, chosen)
    for step in range(2):
        optimizer.zero_grad()
        losses = OF_ONE[change](model(torch.randn(1, 3, dtype=dtype)).square().sum(1))
        loss, info = losses.mean(), {"individual_losses": losses}
        tracked_backward(cockpit, step, loss, optimizer=optimizer, info=info)
        optimizer.step()
    cockpit.close()
    for quantity in chosen:
        for _, number in leaves(cockpit.history[quantity.name][0]):
            assert math.isnan(number)
            assert number.reason.startswith(("N = 1: ", "the update is zero"))


def zero_gradient_run(quantity: Quantity) -> Any:
    model = nn.Linear(3, 2).double()
    cockpit = gradlens.Cockpit(model, [quantity])
    tracked_backward(cockpit, 0, (model(torch.randn(4, 3, dtype=torch.float64)) * 0).mean())
    return cockpit.history[quantity.name][0]


@pytest.mark.parametrize("name", ["NormTest", "InnerTest", "OrthoTest"])
def test_zero_gradient_is_undefined_with_a_reason(name: str) -> None:
    found = zero_gradient_run(getattr(quantities, name)())
    assert math.isnan(found)
    assert found.reason == "the mean gradient is zero"


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (3.0, 0.0, 0.0)])
def test_parallel_gradients_are_said_to_be_equal_only_if_they_are(
    factors: tuple[float, ...],
) -> None:
    """As of the largest loss alone, in which the gradients of all others are zero."""
    model = nn.Linear(3, 2).double()
    cockpit = gradlens.Cockpit(model, [quantities.NormTest(), quantities.OrthoTest()])
    inputs = torch.tensor(factors, dtype=torch.float64)[:, None] * torch.ones(3, 3).double()
    losses = (model(inputs).sum(1) * torch.tensor(factors, dtype=torch.float64)).flatten()
    tracked_backward(cockpit, 0, losses.mean())
    along, across = (cockpit.history[name][0] for name in ("NormTest", "OrthoTest"))
    assert math.isnan(across)
    assert math.isnan(along) == (factors[0] == factors[1])
    assert ("differ by no more" in across.reason) == math.isnan(along)


def test_covariance_of_equal_gradients_is_zero_and_has_no_rank() -> None:
    found = zero_gradient_run(quantities.GradCovariance(k=2))
    assert found["eigenvalues"] == [0, 0]
    assert found["trace"] == 0
    assert "equal" in found["stable_rank"].reason
    assert "equal" in found["layers"]["weight"]["effective_rank"].reason


def test_nan_elements_are_counted_apart() -> None:
    model = nn.Linear(3, 2, bias=False).double()
    torch.nn.init.ones_(model.weight)
    histogram = quantities.GradHist1d(bins=4, range=(-1, 1))
    joint = quantities.GradHist2d(bins=(2, 2))
    cockpit = gradlens.Cockpit(model, [histogram, joint], loss_reduction="sum")
    inputs = torch.tensor([[math.nan, math.inf, -math.inf], [1.0, -1.0, 0.5]]).double()
    tracked_backward(cockpit, 0, model(inputs).sum())
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


def test_noise_scale_without_signal_has_no_upper_end() -> None:
    g = torch.randn(50, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g -= g.mean(0) * 0.9
    found = noise_scale(Dense(g).deviations())
    assert "zero" in found.value.reason
    assert found.high == math.inf
