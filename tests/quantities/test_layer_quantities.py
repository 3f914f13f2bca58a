"""Every quantity of layers against a slow reference, on linear, conv and sequence layers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import CockpitPlotter, History, quantities, schedules
from gradlens.cli.summary_text import as_json, render
from gradlens.history.records import Source
from gradlens.plotting.summary import DeadUnits, dead_units, summarize
from gradlens.quantities import LayerQuantity, Quantity
from gradlens.quantities.parameter_quantity import OfParameters
from tests.cases.layer_cases import CASES, Array, Flow, flows
from tests.cases.records import assert_same_records, leaves
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward

STEPS = 3
BATCHES = (6, 6, 4)
"""Sizes of the batches: the last one is smaller."""


@dataclass(frozen=True)
class Moment:
    """One step: what flows through layers, and parameters, gradients and updates by name."""

    flows: dict[str, Flow]
    parameters: dict[str, Array]
    gradients: dict[str, Array]
    updates: dict[str, Array]


Reference = Callable[[list[Moment], int], dict[str, Any]]
"""From a run and the number of a step to the record."""


def run(case: str, tracked: list[Quantity], parts: int = 1) -> tuple[History, list[Moment]]:
    torch.manual_seed(0)
    model, network = CASES[case].build().double(), CASES[case]
    cockpit = gradlens.Cockpit(model, tracked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moments = []
    for step, size in enumerate(BATCHES):
        inputs = network.inputs(size)
        flow = flows(model, inputs, network.channel_last)
        optimizer.zero_grad()
        for part, some in enumerate(inputs.chunk(parts), 1):
            loss = model(some).square().mean() / parts
            tracked_backward(cockpit, step, loss, optimizer=optimizer, accumulating=part < parts)
        before, gradients = snapshot(model, lambda p: p), snapshot(model, lambda p: p.grad)
        optimizer.step()
        after = snapshot(model, lambda p: p)
        updates = {name: after[name] - before[name] for name in after}
        moments.append(Moment(flow, before, gradients, updates))
    cockpit.close()
    return cockpit.history, moments


def snapshot(model: nn.Module, part: Callable[[nn.Parameter], Any]) -> dict[str, Array]:
    return {name: part(p).detach().numpy().copy() for name, p in model.named_parameters()}


def by_layer(
    formula: Callable[[Flow], Any],
    chosen: Callable[[nn.Module], bool] = lambda _: True,
    summary: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {},
) -> Reference:
    def reference(moments: list[Moment], step: int) -> dict[str, Any]:
        seen = {name: flow for name, flow in moments[step].flows.items() if chosen(flow.module)}
        layers = {name: formula(flow) for name, flow in seen.items()}
        return {"layers": layers, **summary(layers)}

    return reference


def is_activation(module: nn.Module) -> bool:
    return isinstance(module, (nn.ReLU, nn.Tanh, nn.ELU, nn.Sigmoid))


def has_matrix(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Conv2d))


def mean_norm(flow: Flow) -> float:
    return float(np.mean([math.sqrt((sample**2).sum()) for sample in flow.output]))


def mean_rms(flow: Flow) -> float:
    return float(np.mean([math.sqrt((sample**2).mean()) for sample in flow.output]))


def rates(flow: Flow, threshold: float) -> list[float]:
    units = flow.output.reshape(-1, flow.output.shape[-1]).T
    return [sum(abs(value) > threshold for value in unit) / len(unit) for unit in units]


def told(rates: list[float]) -> dict[str, Any]:
    return {
        "active": np.mean(rates),
        "dead": np.mean([rate == 0 for rate in rates]),
        "least": min(rates),
        "least_unit": rates.index(min(rates)),
    }


def over_all(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "active": np.mean([part["active"] for part in parts.values()]),
        "dead": np.mean([part["dead"] for part in parts.values()]),
        "worst": max(part["dead"] for part in parts.values()),
    }


def geometry_of(
    tensors: Callable[[Moment], Mapping[str, Array]], entry: str, normalize: bool = False
) -> Reference:
    def reference(moments: list[Moment], step: int) -> dict[str, Any]:
        before = tensors(moments[step - 1]) if step else {}
        now = tensors(moments[step])
        found = {name: geometry(now[name], before.get(name), normalize) for name in now}
        known = [f["correlation"] for f in found.values() if not math.isnan(f["correlation"])]
        return {entry: found, "correlation": np.mean(known) if known else math.nan}

    return reference


def geometry(now: Array, before: Array | None, normalize: bool) -> dict[str, float]:
    norm = np.linalg.norm(now.ravel())
    size = {"rms": norm / math.sqrt(now.size)} if normalize else {"norm": norm}
    if before is None or before.shape != now.shape:
        return {**size, "correlation": math.nan}
    cosine = (before * now).sum() / (np.linalg.norm(before.ravel()) * norm)
    return {**size, "correlation": cosine}


def at_all_outputs(moment: Moment) -> dict[str, Array]:
    return {name: flow.output_gradient for name, flow in moment.flows.items()}


def at_outputs(moment: Moment) -> dict[str, Array]:
    return {n: f.output_gradient for n, f in moment.flows.items() if not is_activation(f.module)}


def at_inputs(moment: Moment) -> dict[str, Array]:
    found = {n: f for n, f in moment.flows.items() if not is_activation(f.module)}
    return {n: f.input_gradient for n, f in found.items() if f.input_gradient is not None}


def input_gradients(moments: list[Moment], step: int) -> dict[str, Any]:
    found = geometry_of(at_inputs, "layers")(moments, step)
    return {**found, "layers": {"0": math.nan, **found["layers"]}}


def spectrum(data: Array, k: int) -> dict[str, Any]:
    covariance = np.atleast_2d(np.cov(data.reshape(-1, data.shape[-1]).T))
    values = np.sort(np.linalg.eigvalsh(covariance))[::-1].clip(min=0)
    rounding = 1e-12 * values[0]
    ratios = [v if v > rounding else 0 for v in values]

    def condition(place: int) -> float:
        return values[0] / ratios[place] if ratios[place] else math.inf

    n = len(values)
    return {
        "eigenvalues": list(values[:k]),
        "trace": np.trace(covariance),
        "stable_rank": np.trace(covariance) / values[0],
        "condition": condition(n - 1),
        "condition_20": condition(math.floor(0.2 * n)),
        "condition_50": condition(math.floor(0.5 * n)),
        "condition_80": condition(math.floor(0.8 * n)),
    }


def distribution(x: Array) -> dict[str, Any]:
    _, position, channel = np.unravel_index(abs(x).argmax(), x.shape)
    kurtosis = ((x - x.mean()) ** 4).mean() / ((x - x.mean()) ** 2).mean() ** 2 - 3
    return {"largest": abs(x).max(), "kurtosis": kurtosis, "channel": channel, "position": position}


def largest_over(layers: dict[str, Any]) -> dict[str, Any]:
    return {n: max(layer[n] for layer in layers.values()) for n in ("largest", "kurtosis")}


def predictions(z: Array) -> dict[str, Any]:
    z = z.reshape(-1, z.shape[-1])
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    counts = [sum(row.argmax() == k for row in z) for k in range(z.shape[1])]
    return {
        "entropy": -(p * np.log(p)).sum() / len(z),
        "rms": math.sqrt((z**2).mean()),
        "largest": abs(z).max(),
        "top_share": max(counts) / len(z),
        "top_class": counts.index(max(counts)),
        "classes": z.shape[1],
    }


def over_outputs(layers: dict[str, Any]) -> dict[str, Any]:
    return {
        "entropy": np.mean([one["entropy"] / math.log(one["classes"]) for one in layers.values()]),
        "top_share": max(one["top_share"] for one in layers.values()),
    }


def rank_me(flow: Flow) -> float:
    singular = np.linalg.svd(flow.output.reshape(-1, flow.output.shape[-1]), compute_uv=False)
    shares = singular / singular.sum()
    return math.exp(-sum((p + 1e-7) * math.log(p + 1e-7) for p in shares))


def dead(flow: Flow, threshold: float) -> float:
    units = flow.output.reshape(-1, flow.output.shape[-1]).T
    return float(np.mean([(unit <= threshold).all() for unit in units]))


def of_batch_norm(flow: Flow, name: str) -> float:
    channels = flow.input.reshape(-1, flow.input.shape[-1])
    module: Any = flow.module
    deviation = np.sqrt(module.running_var.numpy())
    apart = {
        "MeanTID": channels.mean(0) - module.running_mean.numpy(),
        "VarTID": np.sqrt(channels.var(0)) - deviation,
    }[name]
    return float(np.linalg.norm(apart) / np.linalg.norm(deviation))


def gradient_activation(moments: list[Moment], step: int) -> dict[str, Any]:
    found = {}
    for name, gradient in moments[step].gradients.items():
        rows = [abs(row.ravel()) > 1e-8 for row in gradient]
        found[name] = told([row.sum() / row.size for row in rows])
    return {"parameters": found, **over_all(found)}


def of_parameters(formula: Callable[[Array], Any], dims: int = 0) -> Reference:
    def reference(moments: list[Moment], step: int) -> dict[str, Any]:
        chosen = {n: p for n, p in moments[step].parameters.items() if p.ndim >= dims}
        return {"parameters": {name: formula(p) for name, p in chosen.items()}}

    return reference


def condition_number(parameter: Array) -> float:
    return float(np.linalg.cond(parameter.reshape(len(parameter), -1)))


def singular_values(matrix: Array) -> dict[str, Any]:
    found = np.linalg.svd(matrix.reshape(len(matrix), -1), compute_uv=False)
    return {"norm": found[0], "residual": 0.0, "stable_rank": (found**2).sum() / found[0] ** 2}


def of_updates(moments: list[Moment], step: int) -> dict[str, Any]:
    chosen = {n: u for n, u in moments[step].updates.items() if u.ndim >= 2}
    return {"parameters": {name: singular_values(update) for name, update in chosen.items()}}


def sign_flips(moments: list[Moment], step: int) -> dict[str, Any]:
    now = moments[step].parameters
    if step == 0:
        return {"parameters": dict.fromkeys(now, math.nan)}
    before = moments[step - 1].parameters
    return {"parameters": {name: (now[name] * before[name] < 0).sum() for name in now}}


REFERENCES: dict[str, tuple[Callable[[], Quantity], Reference]] = {
    "OutputNorm": (quantities.OutputNorm, by_layer(mean_norm)),
    "OutputNorm, RMS": (lambda: quantities.OutputNorm(normalize=True), by_layer(mean_rms)),
    "InputNorm": (quantities.InputNorm, by_layer(lambda flow: np.linalg.norm(flow.input.ravel()))),
    "OutputActivation": (
        quantities.OutputActivation,
        by_layer(lambda flow: told(rates(flow, 1e-8)), is_activation, over_all),
    ),
    "OutputActivation, all layers": (
        lambda: quantities.OutputActivation(threshold=0.5, layers="*"),
        by_layer(lambda flow: told(rates(flow, 0.5)), summary=over_all),
    ),
    "DeadNeurons": (quantities.DeadNeurons, by_layer(lambda flow: dead(flow, 0.0), has_matrix)),
    "DeadNeurons, high threshold": (
        lambda: quantities.DeadNeurons(threshold=1.0),
        by_layer(lambda flow: dead(flow, 1.0), has_matrix),
    ),
    "OutputGradientGeometry": (
        quantities.OutputGradientGeometry,
        geometry_of(at_outputs, "layers"),
    ),
    "OutputGradientGeometry, RMS": (
        lambda: quantities.OutputGradientGeometry(normalize=True),
        geometry_of(at_outputs, "layers", normalize=True),
    ),
    "OutputGradientGeometry, all layers": (
        lambda: quantities.OutputGradientGeometry(layers="*"),
        geometry_of(at_all_outputs, "layers"),
    ),
    "InputGradientGeometry": (quantities.InputGradientGeometry, input_gradients),
    "GradientGeometry": (
        quantities.GradientGeometry,
        geometry_of(lambda moment: moment.gradients, "parameters"),
    ),
    "UpdateGeometry": (
        lambda: quantities.UpdateGeometry(normalize=True),
        geometry_of(lambda moment: moment.updates, "parameters", normalize=True),
    ),
    "GradientActivation": (quantities.GradientActivation, gradient_activation),
    "ParameterNorm": (
        quantities.ParameterNorm,
        of_parameters(lambda p: float(np.linalg.norm(p.ravel()))),
    ),
    "ParameterNorm, RMS": (
        lambda: quantities.ParameterNorm(normalize=True),
        of_parameters(lambda p: math.sqrt((p**2).mean())),
    ),
    "ConditionNumber": (quantities.ConditionNumber, of_parameters(condition_number, dims=2)),
    "WeightSignFlips": (quantities.WeightSignFlips, sign_flips),
    "WeightSpectrum": (quantities.WeightSpectrum, of_parameters(singular_values, dims=2)),
    "UpdateSpectrum": (quantities.UpdateSpectrum, of_updates),
    "ActivationOutliers": (
        quantities.ActivationOutliers,
        by_layer(lambda flow: distribution(flow.output), summary=largest_over),
    ),
    "OutputEntropy": (
        lambda: quantities.OutputEntropy(layers=gradlens.signals.is_affine),
        by_layer(lambda flow: predictions(flow.output), has_matrix, over_outputs),
    ),
    "InputMean": (quantities.InputMean, by_layer(lambda flow: flow.input.mean())),
    "InputMean, by feature": (
        lambda: quantities.InputMean(by_feature=True),
        by_layer(lambda flow: flow.input.mean((0, 1))),
    ),
    "InputStd": (quantities.InputStd, by_layer(lambda flow: flow.input.std())),
    "InputStd, by feature": (
        lambda: quantities.InputStd(by_feature=True),
        by_layer(lambda flow: flow.input.std((0, 1))),
    ),
    "InputCovariance": (
        quantities.InputCovariance,
        by_layer(lambda flow: spectrum(flow.input, 5), has_matrix),
    ),
    "OutputGradientCovariance": (
        lambda: quantities.OutputGradientCovariance(k=2),
        by_layer(lambda flow: spectrum(flow.output_gradient, 2), has_matrix),
    ),
    "RankMe": (quantities.RankMe, by_layer(rank_me, has_matrix)),
}

BATCH_NORM: dict[str, type[LayerQuantity]] = {
    "MeanTID": quantities.MeanTID,
    "VarTID": quantities.VarTID,
}


def assert_right(name: str, history: History, moments: list[Moment]) -> None:
    assert [*history[name]] == [*range(STEPS)]
    for step, record in history[name].items():
        assert_same_records(record, REFERENCES[name][1](moments, step), rtol=1e-8)
        floats = [each for _, each in leaves(record) if isinstance(each, float)]
        assert all(each.reason for each in floats if math.isnan(each))
    assert not history.notes


@pytest.mark.parametrize("name", REFERENCES)
def test_each_alone(name: str) -> None:
    (quantity,) = (each for each in everything() if each.name == name)
    assert_right(name, *run("convolutional", [quantity]))


@pytest.mark.parametrize("name", BATCH_NORM)
def test_discrepancy_of_batch_normalisation(name: str) -> None:
    history, moments = run("convolutional", [BATCH_NORM[name]()])
    for step, record in history[name].items():
        expected = of_batch_norm(moments[step].flows["1"], name)
        assert_same_records(record, {"layers": {"1": expected}}, rtol=1e-8)


def test_every_quantity_of_layers_has_a_reference() -> None:
    public = {n: getattr(quantities, n) for n in quantities.__all__ if not n.endswith("Quantity")}
    kinds = (LayerQuantity, OfParameters)
    ours = {n for n, kind in public.items() if issubclass(kind, kinds)}
    elsewhere = {"AttentionEntropy", "AttentionLogits"}  # in tests/signals/test_attention.py
    elsewhere |= {"OptimizerState", "RelativeUpdate"}  # in test_optimizer_state.py
    assert ours - elsewhere == {name.split(",")[0] for name in (*REFERENCES, *BATCH_NORM)}


def everything() -> Iterator[Quantity]:
    for name, (build, _) in REFERENCES.items():
        quantity = build()
        quantity.name = name
        yield quantity


@pytest.mark.parametrize("network", CASES)
def test_all_together(network: str) -> None:
    together, moments = run(network, [*everything()])
    for name in REFERENCES:
        assert_right(name, together, moments)


def test_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where values are computed piece by piece."""
    for name in ("CACHED", "PIECE"):
        monkeypatch.setattr(f"gradlens.signals.reductions.{name}", 7)
    together, moments = run("sequence", [*everything()], parts=2)
    for name in REFERENCES:
        assert_right(name, together, moments)


@pytest.mark.parametrize("quantity", ["OutputGradientGeometry", "GradientGeometry"])
def test_without_correlation_there_is_the_norm_alone(quantity: str) -> None:
    history, _ = run("linear", [getattr(quantities, quantity)(correlation=False)])
    values = next(iter(history[quantity][1].values()))
    assert all(set(value) == {"norm"} for value in values.values())


def test_correlation_is_with_the_step_that_was_tracked_before() -> None:
    quantity = quantities.UpdateGeometry(schedules.linear(2))
    history, moments = run("linear", [quantity])
    a, b = moments[0].updates["0.weight"], moments[2].updates["0.weight"]
    expected = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    found = history["UpdateGeometry"][2]["parameters"]["0.weight"]["correlation"]
    assert found == pytest.approx(expected)


# Corner cases -----------------------------------------------------------------------------------


def record(model: nn.Module, inputs: Tensor, quantity: Quantity, scale: float = 1.0) -> Any:
    cockpit = gradlens.Cockpit(model, [quantity])
    tracked_backward(cockpit, 0, scale * model(inputs).square().mean())
    return cockpit.history[quantity.name][0]


def test_covariance_with_fewer_samples_than_features_has_the_rest_of_its_eigenvalues() -> None:
    inputs = torch.randn(3, 20)
    found = record(nn.Linear(20, 2), inputs, quantities.InputCovariance(k=6))["layers"]["Linear"]
    assert found["eigenvalues"][2:] == pytest.approx([0] * 4, abs=1e-12)
    assert found["condition"] == math.inf
    assert found["trace"] == pytest.approx(inputs.double().var(0).sum().item())


def test_singular_and_broken_weights() -> None:
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    inputs = torch.randn(4, 3)
    found = record(model, inputs, quantities.ConditionNumber())
    assert found["parameters"] == {"weight": math.inf}
    nn.init.constant_(model.weight, math.nan)
    found = record(model, inputs, quantities.ConditionNumber())
    assert "NaN" in found["parameters"]["weight"].reason


def test_half_precision_is_accumulated_in_single() -> None:
    model, inputs = nn.Linear(300, 2).bfloat16(), torch.full((500, 300), 100.0).bfloat16()
    found = record(model, inputs, quantities.InputNorm())["layers"]["Linear"]
    assert found == pytest.approx(100 * math.sqrt(500 * 300), rel=1e-6)
    found = record(model, inputs, quantities.InputMean())["layers"]["Linear"]
    assert found == pytest.approx(100, rel=1e-6)


def test_dead_units_are_listed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 4), nn.ReLU())
    dead = [*range(3, 31), 33]
    with torch.no_grad():
        model[0].bias[:] = 100.0
        model[0].bias[dead] = -100.0
        model[2].bias[:] = 100.0
    run = tmp_path / "run.jsonl"
    cockpit = gradlens.Cockpit(model, [quantities.OutputActivation(units=True)], run=run)
    for step in range(2):
        tracked_backward(cockpit, step, model(torch.rand(50, 3)).sum())
    cockpit.close()
    history = gradlens.load_run(run)
    layers = history["OutputActivation"][1]["layers"]
    assert layers["1"]["dead_units"].tolist() == dead
    assert layers["3"]["dead_units"].tolist() == []
    summary = summarize(history)
    assert summary.dead_units == (DeadUnits("OutputActivation", 1, "1", tuple(dead)),)
    shown = "\n".join(render(summary, 200).splitlines())
    assert "dead units at step 1 by OutputActivation" in shown
    assert "  layer 1: 3, 4, 5," in shown
    assert "26, and 5 more" in shown
    assert json.loads(as_json(summary, "run"))["dead_units"][0]["units"] == dead
    CockpitPlotter(secondary_screen=True).plot(history, show_plot=False)


@pytest.mark.parametrize("broken", [3, "text", [1], None, {"layers": {"1": {"dead_units": 3}}}])
def test_a_record_of_something_else_has_no_dead_units(broken: Any) -> None:
    history = History({"OutputActivation": Source(("OutputActivation",))})
    history.append(0, {"OutputActivation": broken})
    assert dead_units(history) == ()


def reasons(value: Any) -> set[str]:
    """Why numbers of a record are NaN; a failure if one doesn't tell."""
    if isinstance(value, dict):
        return set().union(*(reasons(part) for part in value.values()))
    if not isinstance(value, float) or not math.isnan(value):
        return set()
    return {value.reason}  # type: ignore[attr-defined]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("quantity", "what"),
    [
        (quantities.OutputNorm, "output of"),
        (quantities.InputNorm, "input of"),
        (quantities.InputMean, "input of"),
        (quantities.InputStd, "input of"),
        (quantities.OutputActivation, "output of"),
        (quantities.DeadNeurons, "output of"),
        (quantities.RankMe, "output of"),
        (quantities.InputCovariance, "input of"),
        (quantities.OutputGradientGeometry, "gradient at the output of"),
        (lambda: quantities.InputGradientGeometry(correlation=False), "gradient at the input of"),
        (quantities.OutputGradientCovariance, "gradient at the output of"),
        (quantities.GradientGeometry, "gradient of"),
        (quantities.GradientActivation, "gradient of"),
    ],
)
def test_a_nan_names_what_it_comes_from(
    quantity: Callable[[], Quantity], what: str, broken: float
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(model[2].weight, broken)
    found = reasons(record(model, torch.randn(5, 3), quantity()))
    told = {reason for reason in found if reason.endswith("has NaN or Inf")}
    assert any(reason.startswith(f"the {what} ") for reason in told), found
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    assert {reason.split(" has ")[0].split()[-1] for reason in told} <= names | {"steps"}


SPECTRA = [quantities.RankMe, quantities.InputCovariance, quantities.OutputGradientCovariance]


@pytest.mark.parametrize("quantity", SPECTRA)
@pytest.mark.parametrize(
    ("samples", "features", "value"),
    [(0, 4, 1.0), (0, 1, 1.0), (1, 4, 1.0), (5, 4, 0.0), (5, 4, 1.0), (5, 1, 1.0), (2, 9, 1.0)],
)
def test_spectra_of_little_are_numbers_or_tell_why(
    quantity: type[Quantity], samples: int, features: int, value: float
) -> None:
    model = nn.Linear(features, 3, bias=False)
    # Sums of whole numbers are exact, so that equal samples have equal outputs.
    model.weight.data = torch.arange(3 * features).reshape(3, features) % 5.0 - 2
    found = record(model, torch.full((samples, features), value), quantity())["layers"]["Linear"]
    told = reasons(found)
    if samples == 0:
        assert told == {"the batch is empty"}
    elif quantity is quantities.RankMe:
        assert told == ({"the output is zero"} if not value else set())
        assert not value or found == pytest.approx(1, abs=1e-5)
    else:
        few = "there is one sample: a covariance needs two"
        equal = "all samples are equal: the covariance is zero"
        assert told == {few if samples == 1 else equal}


def test_spectra_of_one_feature() -> None:
    inputs = torch.tensor([[1.0], [3.0]])
    found = record(nn.Linear(1, 1), inputs, quantities.InputCovariance())["layers"]["Linear"]
    assert found["eigenvalues"] == pytest.approx([2.0])
    assert {found[name] for name in ("stable_rank", "condition", "condition_50")} == {1.0}


def Same() -> nn.Module:  # noqa: N802
    """Returns its inputs, and has a parameter."""
    return Net(lambda net, x: x * net.factor, factor=nn.Parameter(torch.ones(())))


def of_layer(quantity: Quantity, inputs: Tensor, layer: nn.Module) -> Any:
    """The value of a layer that gets these inputs."""
    return record(nn.Sequential(Same(), layer), inputs, quantity)["layers"]["1"]


def equal_rows(samples: int, features: int, mean: float) -> Tensor:
    """Their mean is off by rounding, which isn't a direction that they spread along."""
    return (torch.randn(1, features).double() + mean).expand(samples, features).contiguous()


def batch_norm(mean: float, variance: float) -> nn.Module:
    layer = nn.BatchNorm1d(4).eval()
    layer.running_mean.fill_(mean)  # type: ignore[union-attr]
    layer.running_var.fill_(variance)  # type: ignore[union-attr]
    return layer


SOME, SEQUENCES = torch.randn(3, 4), torch.randn(5, 4, 6)
RISING, FULL = torch.arange(12.0).reshape(3, 4).double(), partial(torch.full, (3, 4))
COVARIANCE, OUTLIERS = quantities.InputCovariance, quantities.ActivationOutliers
ENTROPY = quantities.OutputEntropy
MEAN, VARIANCE = (partial(kind, layers="1") for kind in (quantities.MeanTID, quantities.VarTID))
BY_LAST = partial(MEAN, channel_last=True)
EQUAL, BROKEN, EMPTY = "all outputs are equal", "has NaN or Inf", "the batch is empty"
NO_LOGITS, NO_STATISTICS = "are no logits", "the layer keeps no running mean and variance"
UNDEFINED: list[tuple[Callable[[], Quantity], Tensor, nn.Module, str]] = [
    (COVARIANCE, FULL(math.inf), nn.Linear(4, 2), BROKEN),
    (COVARIANCE, equal_rows(64, 10, 1e7), nn.Linear(10, 2), "equal"),
    (COVARIANCE, equal_rows(6, 20, 0.1), nn.Linear(20, 2), "equal"),
    (COVARIANCE, torch.full((7, 4), 1e7 / 3).double(), nn.Linear(4, 2), "equal"),
    (OUTLIERS, FULL(1.5), Same(), EQUAL),
    (OUTLIERS, FULL(1e7 / 3).double(), Same(), EQUAL),
    (OUTLIERS, FULL(0.0), Same(), EQUAL),
    (OUTLIERS, 1e-80 * RISING, Same(), "beyond the range"),
    (OUTLIERS, 1e160 * RISING, Same(), "beyond the range"),
    (OUTLIERS, SOME[:0], Same(), EMPTY),
    (OUTLIERS, FULL(math.inf), Same(), BROKEN),
    (OUTLIERS, FULL(math.nan), Same(), BROKEN),
    (ENTROPY, SOME[:0], nn.Linear(4, 2), EMPTY),
    *((ENTROPY, FULL(each), Same(), BROKEN) for each in (math.nan, math.inf, -math.inf)),
    (ENTROPY, FULL(0.0), nn.Softmax(1), NO_LOGITS),
    (ENTROPY, torch.zeros(3, 1), nn.Sigmoid(), NO_LOGITS),
    (ENTROPY, SOME, nn.LayerNorm(4), NO_LOGITS),
    (ENTROPY, SOME, nn.Dropout(), NO_LOGITS),
    (ENTROPY, torch.zeros(3, 0), Same(), "the layer has no features"),
    (MEAN, SEQUENCES, nn.LayerNorm(6), NO_STATISTICS),
    (MEAN, SEQUENCES, nn.GroupNorm(2, 4), NO_STATISTICS),
    (MEAN, SEQUENCES, nn.BatchNorm1d(4, track_running_stats=False), NO_STATISTICS),
    (VARIANCE, SEQUENCES, nn.InstanceNorm1d(4), NO_STATISTICS),
    (VARIANCE, SEQUENCES, nn.Linear(6, 4), NO_STATISTICS),
    (MEAN, SEQUENCES, batch_norm(math.nan, 1.0), "mean or variance has NaN or Inf"),
    (MEAN, SEQUENCES, batch_norm(0.0, math.inf), "mean or variance has NaN or Inf"),
    (BY_LAST, SEQUENCES, batch_norm(0.0, 1.0), "6 features and the running mean 4: set channel_"),
]


@pytest.mark.parametrize(("quantity", "inputs", "layer", "reason"), UNDEFINED)
def test_what_is_undefined_says_why(
    quantity: Callable[[], Quantity], inputs: Tensor, layer: nn.Module, reason: str
) -> None:
    told = reasons(of_layer(quantity(), inputs, layer.to(inputs.dtype)))
    assert any(reason in each for each in told), told


def odd() -> Any:
    """A complex parameter, and one without elements."""

    def compute(net: Any, x: Tensor) -> Tensor:
        bent = (net.frozen(x).to(torch.complex64) @ net.waves).abs()
        return net.linear(bent) + net.hollow.sum()

    return Net(
        compute,
        frozen=nn.Linear(4, 4).requires_grad_(False),
        linear=nn.Linear(4, 2),
        waves=nn.Parameter(torch.randn(4, 4, dtype=torch.complex64)),
        hollow=nn.Parameter(torch.zeros(0, 3)),
    )


def test_complex_parameters() -> None:
    model = odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tracked = [
        quantities.ParameterNorm(normalize=True), quantities.ConditionNumber(),
        quantities.WeightSignFlips(), quantities.GradientGeometry(),
    ]  # fmt: skip
    cockpit = gradlens.Cockpit(model, tracked)
    gradients = []
    for step in range(2):
        optimizer.zero_grad()
        tracked_backward(cockpit, step, model(torch.randn(5, 4)).square().sum())
        gradients.append(model.waves.grad.numpy().ravel().copy())
    values = {q.name: cockpit.history[q.name][1]["parameters"]["waves"] for q in tracked}
    waves = model.waves.detach().numpy()
    assert values["ParameterNorm"] == pytest.approx(math.sqrt((abs(waves) ** 2).mean()))
    assert values["ConditionNumber"] == pytest.approx(np.linalg.cond(waves), rel=1e-3)
    assert values["WeightSignFlips"].reason == "complex numbers have no sign"
    first, second = gradients
    cosine = np.vdot(first, second).real / np.linalg.norm(first) / np.linalg.norm(second)
    assert values["GradientGeometry"]["norm"] == pytest.approx(np.linalg.norm(second), rel=1e-5)
    assert values["GradientGeometry"]["correlation"] == pytest.approx(cosine, rel=1e-5)


def test_conditions_of_no_matrix() -> None:
    model = odd()
    nn.init.zeros_(model.linear.weight)
    found = record(model, torch.randn(5, 4), quantities.ConditionNumber())["parameters"]
    assert found["linear.weight"].reason == "the parameter is zero"
    assert found["hollow"].reason == "the parameter has no elements"


def test_gradients_in_half_precision_survive_the_scale() -> None:
    model = nn.Linear(2, 1, bias=False).half()
    cockpit = gradlens.Cockpit(model, [quantities.GradientGeometry(correlation=False)])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    loss = model(torch.ones(1, 2).half()).float().sum() * 1e-9
    scaler.scale(loss)  # it is made with its first use
    with cockpit(0, loss=loss, scaler=scaler):
        scaler.scale(loss).backward()
    found = cockpit.history["GradientGeometry"][0]["parameters"]["weight"]["norm"]
    assert found == pytest.approx(math.sqrt(2) * 1e-9, rel=1e-2)
