"""Curvature of a probe: equal to dense references, and without any effect on training."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradlens
from gradlens import Cockpit, quantities
from gradlens.curvature import Curvature, HessianOperator, Probe
from gradlens.curvature.estimate import Estimate, weighted_sum
from gradlens.history.undefined import Undefined
from gradlens.quantities import (
    CurvatureQuantity,
    HessEigenvalues,
    HessMaxEV,
    HessTrace,
    Quantity,
    SpectralDensity,
    Stability,
)
from gradlens.schedules import linear
from tests.cases import curvature_cases
from tests.cases.curvature_cases import Problem, Reduction, build
from tests.cases.steps import tracked_backward

ON_PROBES: dict[str, Callable[[Probe], Quantity]] = {
    "HessMaxEV": lambda probe: HessMaxEV(on=probe),
    "HessEigenvalues": lambda probe: HessEigenvalues(on=probe, k=2, by="layer"),
    "GGN": lambda probe: HessEigenvalues(on=probe, matrix="ggn", k=2),
    "trace of the GGN": lambda probe: HessTrace(on=probe, curvature="diag_ggn_exact"),
    "SpectralDensity": lambda probe: SpectralDensity(on=probe, steps=4),
    "Stability": lambda probe: Stability(on=probe),
}
KINDS = ("HessMaxEV", "HessEigenvalues", "HessTrace", "SpectralDensity", "Stability")


class Matrices(CurvatureQuantity):
    """Dense matrices, and what is known of the samples."""

    def compute(self, curvature: Curvature) -> Any:
        identity = np.eye(curvature.hessian.shape[0])
        return {
            "hessian": curvature.hessian @ identity,
            "ggn": curvature.ggn @ identity,
            "factor": curvature.loss_factor,
            "part": curvature.is_part,
        }


class Diagonal(CurvatureQuantity):
    def compute(self, curvature: Curvature) -> Any:
        found = curvature.diagonal("diag_h", 2)
        assert curvature.diagonal("diag_h", 2) is found
        values = torch.cat([each.flatten() for each in found.values.values()]).numpy()
        return {"diagonal": values, "trace": found.trace.value, "method": found.method}


def probe_of(problem: Problem, reduction: Reduction, batches: int) -> Probe:
    data = problem.batches if batches > 1 else [(problem.inputs, problem.targets)]
    return Probe(data, problem.loss_of(reduction), loss_reduction=reduction)


def step_of(
    model: nn.Module, tracked: list[Quantity], global_step: int = 0, **options: Any
) -> Cockpit:
    """A cockpit after one step on a batch that no probe has."""
    cockpit = Cockpit(model, tracked, **options)
    step_on(cockpit, model, global_step)
    return cockpit


def step_on(cockpit: Cockpit, model: nn.Module, global_step: int) -> None:
    first = next(model.parameters())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(global_step))
    optimizer.zero_grad()
    loss = model(inputs.to(first)).square().sum(1).mean()
    tracked_backward(cockpit, global_step, loss, optimizer=optimizer)
    optimizer.step()


@pytest.mark.parametrize(
    ("network", "reduction", "batches"),
    [
        *(("perceptron", "mean", 1), ("perceptron", "sum", 3), ("frozen", "sum", 1)),
        *((name, "mean", 3) for name in ("convolutional", "normalised", "tied", "frozen")),
    ],
)
def test_matrices_are_those_of_all_data(network: str, reduction: Reduction, batches: int) -> None:
    problem = build(network, "cross-entropy")
    hessian = curvature_cases.dense_hessian(problem, "mean").numpy()
    ggn = curvature_cases.dense_ggn(problem, "mean").numpy()
    modes = [module.training for module in problem.model.modules()]
    cockpit = step_of(problem.model, [Matrices(on=probe_of(problem, reduction, batches))])
    found = cockpit.history["Matrices"][0]
    np.testing.assert_allclose(found["hessian"], hessian, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found["ggn"], ggn, rtol=1e-9, atol=1e-12)
    assert found["factor"] == (len(problem.inputs) if reduction == "sum" else 1)
    assert found["part"] is False
    assert modes == [module.training for module in problem.model.modules()]


@pytest.mark.parametrize("batches", [1, 3])
def test_diagonals_are_those_of_all_data(batches: int) -> None:
    problem = build("piecewise linear", "cross-entropy")
    expected = curvature_cases.dense_hessian(problem, "mean").numpy().diagonal()
    cockpit = step_of(problem.model, [Diagonal(on=probe_of(problem, "sum", batches))])
    found = cockpit.history["Diagonal"][0]
    np.testing.assert_allclose(found["diagonal"], expected, rtol=1e-9, atol=1e-12)
    assert found["trace"] == pytest.approx(expected.sum())
    assert found["method"] == "exact"


@pytest.mark.parametrize("batches", [1, 3])
def test_estimated_traces_are_within_their_intervals(batches: int) -> None:
    problem = build("tied", "mse")
    expected = float(curvature_cases.dense_hessian(problem, "mean").trace())
    quantity = HessTrace(on=probe_of(problem, "mean", batches), samples=50)
    with pytest.warns(gradlens.GradlensWarning, match="diag_h is estimated"):
        found = step_of(problem.model, [quantity]).history["HessTrace"][0]
    assert found["method"] == "Hutchinson"
    assert abs(found["trace"] - expected) < 4 * found["standard_error"]
    assert found["standard_error"] < 0.2 * expected


def test_modes_are_those_of_the_probe() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs, targets = torch.randn(9, 4).double(), torch.randint(3, (9,))
    model(inputs)
    function = nn.CrossEntropyLoss()

    def largest(mode: bool) -> float:
        loss, parameters = function(model.train(mode)(inputs), targets), model.named_parameters()
        hessian = HessianOperator(loss, dict(parameters))
        return float(np.linalg.eigvalsh(hessian @ np.eye(hessian.shape[0]))[-1])

    data = [(inputs, targets)]
    tracked: list[Quantity] = [
        HessMaxEV(on=Probe(data, function, training=mode), tolerance=1e-8, name=str(mode))
        for mode in (False, True)
    ]
    expected = {mode: largest(mode) for mode in (True, False)}  # with the statistics by then
    model.train()
    cockpit = Cockpit(model, tracked)
    statistics = model[1].running_mean.clone()
    tracked_backward(cockpit, 0, model[0].weight.square().sum())
    assert torch.equal(model[1].running_mean, statistics)
    for mode, largest_value in expected.items():
        assert cockpit.history[str(mode)][0] == pytest.approx(largest_value, rel=1e-6)
    assert abs(expected[True] - expected[False]) > 1e-3


class Merging(nn.Sequential):
    """Changes its weights when its mode is changed, as classes do that merge adapters."""

    def train(self, mode: bool = True) -> Merging:
        with torch.no_grad():
            next(self.parameters()).mul_(2)
        return super().train(mode)


class Drawing(nn.Linear):
    """Draws from Python's and numpy's global generators, and ignores what it draws."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * (random.random() + np.random.rand())


def outcome(batches: int, training: bool, is_tracked: bool) -> list[Tensor]:
    """All that three steps leave behind, with or without probes."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    drop = 0.0 if training else 0.5
    model = Merging(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(drop), Drawing(4, 3))
    inputs, targets = torch.randn(9, 4), torch.randint(3, (9,))
    data = DataLoader(TensorDataset(inputs, targets), 9 // batches)
    probe = Probe(data, nn.CrossEntropyLoss(), training=training)
    probed = [make(probe) for make in ON_PROBES.values()]
    for name, quantity in zip(ON_PROBES, probed, strict=True):
        quantity.name = name
    own: list[Quantity] = [HessMaxEV(name="own"), quantities.OutputNorm(), quantities.UpdateSize()]
    cockpit = Cockpit(model, [*own, *(probed if is_tracked else [])], strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    left: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[step:]), targets[step:])
        tracked_backward(cockpit, step, loss, optimizer=optimizer)
        left += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    numbers = [random.random(), np.random.rand(), cockpit.history["own"][1]]
    modes = [module.training for module in model.modules()]
    left += [*model.state_dict().values(), torch.get_rng_state(), torch.tensor(modes)]
    return [*left, torch.tensor(numbers, dtype=torch.float64)]


@pytest.mark.filterwarnings("ignore:gradlens, step 0.*is estimated")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.slow
def test_training_is_bit_identical(batches: int, training: bool) -> None:
    without, tracked = (outcome(batches, training, each) for each in (False, True))
    assert len(without) == len(tracked)
    assert all(map(torch.equal, without, tracked))


@pytest.mark.slow
def test_hooks_of_gradlens_are_paused_and_the_steps_calls_stay_known() -> None:
    """The number of samples is read off the step's calls, of which 64 are kept."""
    data = [(torch.randn(1, 4), torch.randint(3, (1,))) for _ in range(70)]
    on = Probe(data, nn.CrossEntropyLoss())
    histories = []
    for probes in ([], [HessMaxEV(on=on)]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        own: list[Quantity] = [quantities.NormTest(), quantities.OutputNorm()]
        own += [HessTrace(curvature="diag_ggn_mc"), Stability()]
        cockpit = step_of(model, [*own, *probes], loss_reduction="sum")
        step_on(cockpit, model, 1)
        tables = [dict(each) for each in cockpit.history.facts.values()]
        histories.append([*(dict(cockpit.history[q.name]) for q in own), *tables])
    np.testing.assert_equal(*histories)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_values_under_accumulation_are_those_of_the_probe_once_a_step(reduction: Reduction) -> None:
    problem = build("perceptron", "cross-entropy")
    calls = [0]

    def function(outputs: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        return problem.loss_of(reduction)(outputs, targets)

    on = Probe(problem.batches, function, loss_reduction=reduction)
    own, plain = HessMaxEV(on=on, tolerance=1e-8), Stability(on=on, tolerance=1e-8)
    cockpit = Cockpit(problem.model, [own, plain], loss_reduction=reduction)
    largest = np.linalg.eigvalsh(curvature_cases.dense_hessian(problem, "mean").numpy())[-1]
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    loss_function = problem.loss_of(reduction)
    for part, (inputs, targets) in enumerate(problem.batches):
        last = part == len(problem.batches) - 1
        loss = loss_function(problem.model(inputs), targets)
        weight = 1 if reduction == "sum" else len(inputs) / len(problem.inputs)
        before = calls[0]
        with cockpit(0, accumulating=not last, loss=loss, optimizer=optimizer):
            (weight * loss).backward()
        assert (calls[0] > before) == last
    record = cockpit.history["Stability"][0]
    samples = len(problem.inputs) if reduction == "sum" else 1
    assert cockpit.history["HessMaxEV"][0] == pytest.approx(largest, rel=1e-6)
    assert record["sharpness"] == pytest.approx(largest, rel=1e-6)
    assert record["threshold"] == pytest.approx(2 / (0.1 * samples), rel=1e-6)
    assert not cockpit.history.notes


@pytest.mark.parametrize("batch_size", [None, 6])
def test_a_step_on_a_sum_loss_has_a_threshold_where_its_size_is_known(
    batch_size: int | None,
) -> None:
    problem = build("perceptron", "mse")
    cockpit = Cockpit(
        problem.model,
        [Stability(on=probe_of(problem, "mean", 1), tolerance=1e-8)],
        loss_reduction="sum",
    )
    largest = np.linalg.eigvalsh(curvature_cases.dense_hessian(problem, "mean").numpy())[-1]
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    loss = problem.model(problem.inputs[:6]).square().sum()
    info = {} if batch_size is None else {"batch_size": batch_size}
    tracked_backward(cockpit, 0, loss, optimizer=optimizer, info=info)
    record = cockpit.history["Stability"][0]
    if batch_size is None:
        assert "info={'batch_size': N}" in record.reason
    else:
        assert record["threshold"] == pytest.approx(2 / (0.1 * 6))
        assert record["sharpness"] == pytest.approx(largest, rel=1e-6)


def test_parameters_may_be_frozen_and_unfrozen_between_steps() -> None:
    problem = build("perceptron", "mse")
    cockpit = Cockpit(problem.model, [HessMaxEV(on=probe_of(problem, "mean", 3), tolerance=1e-8)])
    for step, trained in enumerate([(True, True), (False, True), (True, False)]):
        for layer, needed in zip((problem.model[0], problem.model[2]), trained, strict=True):
            layer.requires_grad_(needed)
        hessian = curvature_cases.dense_hessian(problem, "mean").numpy()
        step_on(cockpit, problem.model, step)
        value = cockpit.history["HessMaxEV"][step]
        assert value == pytest.approx(np.linalg.eigvalsh(hessian)[-1], rel=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.slow
def test_compiled_models_stay_compiled_for_the_step(in_place: bool) -> None:
    torch.compiler.reset()  # other tests may have compiled the same code as often as torch does
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    inputs, targets = torch.randn(9, 4), torch.randint(3, (9,))
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model: Any = inner
    if in_place:
        inner.compile(backend=backend)
    else:
        model = torch.compile(inner, backend=backend)
    cockpit = Cockpit(model, [HessMaxEV(on=Probe([(inputs, targets)], nn.CrossEntropyLoss()))])
    loss = nn.functional.cross_entropy(model(inputs), targets)
    count = len(graphs)
    tracked_backward(cockpit, 0, loss)
    model(inputs)
    assert len(graphs) == count > 0
    matrix = HessianOperator.over_data(inner, nn.CrossEntropyLoss(), [(inputs, targets)])
    largest = np.linalg.eigvalsh(matrix @ np.eye(matrix.shape[0], dtype=np.float32))[-1]
    assert cockpit.history["HessMaxEV"][0] == pytest.approx(largest, rel=2e-3)
    assert not cockpit.history.notes


def test_autocast_has_no_effect_on_a_probe_and_stays_as_it_is() -> None:
    found = []
    for enabled in (False, True):
        problem = build("perceptron", "mse")
        cockpit = Cockpit(problem.model, [HessMaxEV(on=probe_of(problem, "mean", 1))])
        loss = problem.model(problem.inputs).square().mean()
        with torch.autocast("cpu", enabled=enabled), cockpit(0):
            assert torch.is_autocast_enabled("cpu") == enabled
            loss.backward()
        found.append(cockpit.history["HessMaxEV"][0])
    assert found[0] == found[1]


class Mapped(nn.Module):
    """A model that is called with keyword arguments and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor, scale: float) -> dict[str, Tensor]:
        return {"logits": torch.tanh(self.layer(x)) * scale}


def test_batches_and_outputs_of_any_form() -> None:
    torch.manual_seed(0)
    model, function = Mapped(), nn.CrossEntropyLoss()
    inputs, labels = torch.randn(6, 4).double(), torch.randint(3, (6,))
    data = [{"x": inputs[:4], "labels": labels[:4]}, {"x": inputs[4:], "labels": labels[4:]}]
    probe = Probe(
        data,
        lambda outputs, targets: function(outputs["logits"], targets),
        split=lambda batch: ({"x": batch["x"], "scale": 2.0}, batch["labels"]),
    )
    cockpit = Cockpit(model, [Matrices(on=probe)])
    loss = model(inputs, 2.0)["logits"].sum()
    with cockpit(0):
        loss.backward()
    found = cockpit.history["Matrices"][0]
    logits = model(inputs, 2.0)["logits"]
    loss = function(logits, labels)
    parameters = dict(model.named_parameters())
    dense = HessianOperator(loss, parameters) @ np.eye(15)
    np.testing.assert_allclose(found["hessian"], dense, atol=1e-12)
    ggn = gradlens.curvature.GGNOperator(loss, logits, parameters) @ np.eye(15)
    np.testing.assert_allclose(found["ggn"], ggn, atol=1e-12)


# What is refused.


def test_quantities_that_take_no_probe() -> None:
    probe = Probe([], nn.CrossEntropyLoss())
    for mixed in (quantities.TICDiag, quantities.TICTrace):
        with pytest.raises(TypeError, match="'on'"):
            mixed(on=probe)  # type: ignore[call-arg]
    assert "data" not in repr(HessMaxEV(on=probe))


def shuffled() -> Probe:
    data = TensorDataset(torch.randn(8, 4), torch.randint(3, (8,)))
    return Probe(DataLoader(data, 4, shuffle=True), nn.CrossEntropyLoss())


def dropped() -> Probe:
    data = [(torch.randn(3, 4), torch.randint(3, (3,)))]
    return Probe(data, nn.CrossEntropyLoss(), training=True)


def failing() -> Probe:
    def split(_: Any) -> Any:
        raise KeyError("no such key")

    return Probe([{}], nn.CrossEntropyLoss(), split=split)


def empty() -> Probe:
    return Probe([(torch.randn(0, 4), torch.randint(3, (0,)))], nn.CrossEntropyLoss())


REFUSED: dict[str, tuple[Callable[[], Probe], str]] = {
    "shuffled": (shuffled, "isn't the same as in the first pass.*shuffle=False"),
    "dropout": (dropped, r"active dropout.*of a Probe: training=False"),
    "failing": (failing, "no such key"),
    "without samples": (empty, "batch 0 of the data has no samples"),
    "without batches": (lambda: Probe([], nn.CrossEntropyLoss()), "the data has no batches"),
    "coupled": (
        lambda: Probe([(torch.randn(3, 4), torch.randn(3, 3))], lambda x, y: (x - y).norm()),
        "the loss of batch 0 isn't the mean over its samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_probe_that_fails_is_a_nan_with_its_reason(name: str) -> None:
    torch.manual_seed(0)
    make, reason = REFUSED[name]
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    probe = make()
    with pytest.warns(gradlens.GradlensWarning, match="a probe failed"):
        cockpit = step_of(model, [HessMaxEV(on=probe), HessTrace(on=probe), HessMaxEV(name="own")])
    for quantity in ("HessMaxEV", "HessTrace"):
        value = cockpit.history[quantity][0]
        assert isinstance(value, Undefined)
        assert re.search(reason, value.reason), value.reason
    assert np.isfinite(cockpit.history["own"][0])
    assert all(module.training for module in model.modules())
    strict = Cockpit(model, [HessMaxEV(on=make())], strict=True)
    with pytest.raises(Exception, match=reason):
        step_on(strict, model, 0)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("case", ["linear", "beside", "none"])
def test_a_ggn_that_is_not_that_of_the_loss_is_refused(case: str, batches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))
    functions: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
        "linear": (nn.functional.nll_loss, "let the model return another tensor, such as the log"),
        "beside": (
            lambda x, y: nn.functional.cross_entropy(x, y) + model[0].weight.square().sum(),
            "depends on 0.weight in other ways than through the model's output.*let the model",
        ),
        "none": (lambda x, y: model[0].weight.square().sum(), "the one tensor that the model"),
    }
    function, reason = functions[case]
    inputs, labels = torch.randn(6, 4), torch.randint(3, (6,))
    data = list(zip(inputs.chunk(batches), labels.chunk(batches), strict=True))
    on = Probe(data, function)
    tracked: list[Quantity] = [HessEigenvalues(on=on, matrix="ggn"), HessMaxEV(on=on)]
    tracked.append(HessTrace(on=on, curvature="diag_ggn_exact"))
    history = step_of(model, tracked).history
    assert np.isfinite(history["HessMaxEV"][0])
    for value in (history["HessEigenvalues"][0], history["HessTrace"][0]):
        text = value.reason if isinstance(value, Undefined) else value["reason"]
        assert re.search(reason, text), text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_quantities_with_a_probe_keep_the_contract(kind: str) -> None:
    """A schedule and a name of their own, no note, and NaN where all parameters are frozen."""
    problem = build("piecewise linear", "mse")
    probe = probe_of(problem, "mean", 3)
    quantity = getattr(quantities, kind)(linear(2), on=probe, name="probed")
    assert getattr(quantities, kind)().on is None
    cockpit = Cockpit(problem.model, [quantity])
    for step in range(3):
        step_on(cockpit, problem.model, step)
    assert list(cockpit.history["probed"]) == [0, 2]
    assert not cockpit.history.notes
    problem.model.requires_grad_(False)
    scale = torch.ones((), requires_grad=True, dtype=torch.float64)
    loss = scale * problem.model(problem.inputs).square().mean()
    tracked_backward(cockpit, 4, loss, optimizer=torch.optim.SGD(problem.model.parameters(), 0.1))
    assert "frozen" in cockpit.history["probed"][4].reason


def test_sums_of_estimates() -> None:
    parts = [Estimate(1.0, 3.0, 4, 5), Estimate(2.0, 4.0, 4, 5)]
    found = weighted_sum(parts, [1.0, 1.0])
    assert found == Estimate(3.0, 5.0, 625 / (81 / 4 + 256 / 4), 10)
    exact = weighted_sum([Estimate(1.0, 0.0, 1, 1)] * 2, [0.25, 0.75])
    assert (exact.value, exact.standard_error) == (1.0, 0.0)
    one_draw = weighted_sum([parts[0], Estimate(2.0, Undefined("why"), 1, 0)], [1, 1])
    assert one_draw.value == 3.0
    assert isinstance(one_draw.standard_error, Undefined)
    assert one_draw.standard_error.reason == "why"
