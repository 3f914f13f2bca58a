"""Every quantity of layers against a slow reference, on linear, conv and sequence layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import History, quantities, schedules
from gradlens.quantities import LayerQuantity, ParameterQuantity, Quantity, UpdateQuantity
from tests.layer_cases import CASES, Array, Flow, flows

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


def run(case: str, tracked: list[Quantity]) -> tuple[History, list[Moment]]:
    torch.manual_seed(0)
    model, network = CASES[case].build().double(), CASES[case]
    cockpit = gradlens.Cockpit(model, tracked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moments = []
    for step, size in enumerate(BATCHES):
        inputs = network.inputs(size)
        flow = flows(model, inputs, network.channel_last)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
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


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d)


def gradient_activation(moments: list[Moment], step: int) -> dict[str, Any]:
    found = {}
    for name, gradient in moments[step].gradients.items():
        rows = [abs(row.ravel()) > 1e-8 for row in gradient]
        found[name] = told([row.sum() / row.size for row in rows])
    return {"parameters": found, **over_all(found)}


def of_parameters(formula: Callable[[Array], float], dims: int = 0) -> Reference:
    def reference(moments: list[Moment], step: int) -> dict[str, Any]:
        chosen = {n: p for n, p in moments[step].parameters.items() if p.ndim >= dims}
        return {"parameters": {name: formula(p) for name, p in chosen.items()}}

    return reference


def condition_number(parameter: Array) -> float:
    return float(np.linalg.cond(parameter.reshape(len(parameter), -1)))


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
    "DeadNeurons": (
        quantities.DeadNeurons,
        by_layer(lambda flow: dead(flow, 0.0), has_matrix),
    ),
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


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where} {key}")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found), where
        assert found.reason, where
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12, err_msg=where)


@pytest.mark.parametrize("network", CASES)
@pytest.mark.parametrize("name", REFERENCES)
def test_quantity(name: str, network: str) -> None:
    build, reference = REFERENCES[name]
    quantity = build()
    history, moments = run(network, [quantity])
    assert [*history[quantity.name]] == [*range(STEPS)]
    for step, record in history[quantity.name].items():
        assert_same(record, reference(moments, step), f"step {step}")
    assert not history.notes


@pytest.mark.parametrize("name", BATCH_NORM)
def test_discrepancy_of_batch_normalisation(name: str) -> None:
    history, moments = run("convolutional", [BATCH_NORM[name]()])
    for step, record in history[name].items():
        expected = of_batch_norm(moments[step].flows["1"], name)
        assert_same(record, {"layers": {"1": expected}})


def test_every_quantity_of_layers_has_a_reference() -> None:
    public = {n: getattr(quantities, n) for n in quantities.__all__ if not n.endswith("Quantity")}
    kinds = (LayerQuantity, ParameterQuantity)
    ours = {n for n, kind in public.items() if issubclass(kind, kinds)} | {"UpdateGeometry"}
    assert ours == {name.split(",")[0] for name in (*REFERENCES, *BATCH_NORM)}


def everything() -> Iterator[Quantity]:
    for name, (build, _) in REFERENCES.items():
        quantity = build()
        quantity.name = name
        yield quantity


@pytest.mark.parametrize("network", CASES)
def test_all_together_are_what_each_is_alone(network: str) -> None:
    together, moments = run(network, [*everything()])
    for name, (_, reference) in REFERENCES.items():
        assert_same(together[name][1], reference(moments, 1), name)


@pytest.mark.parametrize("quantity", ["OutputGradientGeometry", "GradientGeometry"])
def test_without_correlation_there_is_the_norm_alone(quantity: str) -> None:
    history, _ = run("linear", [getattr(quantities, quantity)(correlation=False)])
    values = next(iter(history[quantity][1].values()))
    assert all(set(value) == {"norm"} for value in values.values())


def test_reasons_of_correlations() -> None:
    history, _ = run("linear", [quantities.OutputGradientGeometry()])
    records = history["OutputGradientGeometry"]
    assert "no step before" in records[0]["layers"]["0"]["correlation"].reason
    assert "shape" in records[2]["layers"]["0"]["correlation"].reason
    history, _ = run("linear", [quantities.InputGradientGeometry()])
    assert "needs no gradient" in history["InputGradientGeometry"][1]["layers"]["0"].reason


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
    loss = scale * model(inputs).square().mean()
    with cockpit(0, loss=loss):
        loss.backward()
    return cockpit.history[quantity.name][0]


def test_covariance_with_fewer_samples_than_features_has_the_rest_of_its_eigenvalues() -> None:
    inputs = torch.randn(3, 20)
    found = record(nn.Linear(20, 2), inputs, quantities.InputCovariance(k=6))["layers"]["Linear"]
    assert found["eigenvalues"][2:] == pytest.approx([0] * 4, abs=1e-12)
    assert found["condition"] == math.inf
    assert found["trace"] == pytest.approx(inputs.double().var(0).sum().item())


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (torch.randn(1, 4), "one sample"),
        (torch.full((3, 4), 1e3), "equal"),
        (torch.full((3, 4), math.inf), "NaN or Inf"),
    ],
)
def test_undefined_covariances_say_why(inputs: Tensor, reason: str) -> None:
    layers = record(nn.Linear(4, 2), inputs, quantities.InputCovariance())["layers"]
    found = layers["Linear"]
    assert reason in (found["stable_rank"] if isinstance(found, dict) else found).reason


def test_small_output_gradients_have_the_condition_of_large_ones() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3).double(), torch.randn(9, 4).double()
    large, small = (
        record(model, inputs, quantities.OutputGradientCovariance(), scale)["layers"]["Linear"]
        for scale in (1.0, 1e-9)
    )
    assert small["condition"] == pytest.approx(large["condition"])
    assert small["condition"] < 1e3


def test_broken_inputs_never_raise() -> None:
    for network in CASES.values():
        model, inputs = network.build(), network.inputs(4).float()
        inputs.view(-1)[:2] = torch.tensor([math.nan, math.inf])
        cockpit = gradlens.Cockpit(model, [*everything()])
        for step in range(2):
            loss = model(inputs).square().mean()
            with cockpit(step, loss=loss):
                loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert {*cockpit.history["RankMe"]} == {0, 1}


def test_parameters_without_a_gradient_say_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tracked = [quantities.GradientGeometry(), quantities.GradientActivation()]
    cockpit = gradlens.Cockpit(model, tracked)
    with cockpit(0):
        model[0](torch.ones(3, 2)).sum().backward()
    for name in ("GradientGeometry", "GradientActivation"):
        parts = cockpit.history[name][0]["parameters"]
        assert "no gradient" in parts["1.weight"].reason
        assert isinstance(parts["0.weight"], dict)


def test_singular_and_broken_weights() -> None:
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    inputs = torch.randn(4, 3)
    found = record(model, inputs, quantities.ConditionNumber())
    assert found["parameters"] == {"weight": math.inf}
    nn.init.constant_(model.weight, math.nan)
    found = record(model, inputs, quantities.ConditionNumber())
    assert "NaN" in found["parameters"]["weight"].reason


def test_batch_normalisation_without_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False))
    found = record(model, torch.randn(5, 2), quantities.MeanTID())
    assert "no running mean" in found["layers"]["1"].reason


def test_half_precision_is_accumulated_in_single() -> None:
    model, inputs = nn.Linear(300, 2).bfloat16(), torch.full((500, 300), 100.0).bfloat16()
    found = record(model, inputs, quantities.InputNorm())["layers"]["Linear"]
    assert found == pytest.approx(100 * math.sqrt(500 * 300), rel=1e-6)
    found = record(model, inputs, quantities.InputMean())["layers"]["Linear"]
    assert found == pytest.approx(100, rel=1e-6)


@pytest.mark.parametrize("k", [0, -1])
def test_covariance_of_no_eigenvalues(k: int) -> None:
    with pytest.raises(ValueError, match="asks for no eigenvalue"):
        quantities.InputCovariance(k=k)


@pytest.mark.parametrize("kind", [quantities.OutputNorm, quantities.ParameterNorm])
def test_a_string_is_no_schedule(kind: type[Quantity]) -> None:
    with pytest.raises(TypeError, match="track_schedule='linear' is not callable"):
        kind("linear")  # type: ignore[arg-type]


def test_an_update_quantity_is_one_of_those_that_wait() -> None:
    assert issubclass(quantities.UpdateGeometry, UpdateQuantity)


@pytest.mark.parametrize(
    "quantity", [quantities.OutputActivation, quantities.DeadNeurons, quantities.GradientActivation]
)
def test_nan_is_neither_dead_nor_alive(quantity: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    cockpit = gradlens.Cockpit(model, [quantity()])
    inputs = torch.randn(5, 3)
    inputs[0, 0] = math.nan
    loss = model(inputs).square().sum()
    with cockpit(0, loss=loss):
        loss.backward()
    record = cockpit.history[quantity.__name__][0]
    values = record.get("layers", record.get("parameters"))
    assert all(getattr(value, "reason", "") == "it has NaN" for value in values.values()), record
