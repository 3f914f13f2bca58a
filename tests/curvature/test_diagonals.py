"""HessTrace, TICDiag and TICTrace against dense matrices, wherever their diagonals come from."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import backpack
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit, quantities
from gradlens.curvature import HessianOperator
from gradlens.history.undefined import Undefined
from tests.cases.references import dense_ggn, dense_hessian, flat, per_sample_gradients_by_loop
from tests.cases.steps import tracked_backward

INPUT_WITHOUT_GRADIENT = "ignore:Full backward hook is firing"
"""Torch's warning on BackPACK's hooks where the network's input needs no gradient."""

SAMPLES = 6
KINDS = ("diag_h", "diag_ggn_exact", "diag_ggn_mc")


class Residual(nn.Module):
    """Beyond BackPACK's rules, within those of per-sample gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.nn.functional.gelu(self.norm(self.first(x))) + x)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Times(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.scale


class Normalised(nn.Module):
    """A block of a residual network, in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))) + x)


PIECEWISE_LINEAR: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "ReLU in place": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 2, 2, padding=1),
        nn.LeakyReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2, 3),
    ),
    "frozen layer": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 3)
    ),
    "user's module": lambda: nn.Sequential(nn.Linear(4, 3), Doubling()),
    "parametrised": lambda: nn.Sequential(
        nn.utils.parametrize.register_parametrization(nn.Linear(4, 3), "weight", Doubling())
    ),
    "normalised": Normalised,
}
CURVED: dict[str, Callable[[], nn.Module]] = {
    "nested sigmoid": lambda: nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(4, 5), nn.Sigmoid()), nn.Linear(5, 3)
    ),
    "residual": Residual,
    "GELU": lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)),
    "circular padding": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)),
        nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular"),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "unused layer": Unused,
}
LOSSES: dict[str, Callable[[str], nn.Module]] = {
    "cross-entropy": lambda reduction: nn.CrossEntropyLoss(reduction=reduction),
    "squared error": lambda reduction: nn.MSELoss(reduction=reduction),
    "binary": lambda reduction: nn.BCEWithLogitsLoss(reduction=reduction),
    "smoothed": lambda reduction: nn.CrossEntropyLoss(reduction=reduction, label_smoothing=0.2),
}


def targets_for(loss_function: nn.Module) -> Tensor:
    if isinstance(loss_function, nn.CrossEntropyLoss):
        return torch.randint(3, (SAMPLES,))
    if isinstance(loss_function, nn.BCEWithLogitsLoss):
        return torch.randint(2, (SAMPLES, 3)).double()
    return torch.randn(SAMPLES, 3, dtype=torch.float64)


class Case:
    """A network, a loss and a batch, with the dense matrices of its mean loss."""

    def __init__(
        self, build: Callable[[], nn.Module], loss_function: nn.Module, factor: float = 1.0
    ) -> None:
        torch.manual_seed(0)
        self.model = build().double()
        self.loss_function = gradlens.extend(loss_function)
        self.reduction = loss_function.reduction
        self.factor = factor
        self.inputs = torch.randn(SAMPLES, 4, dtype=torch.float64)
        self.targets = targets_for(loss_function)
        self.plain_model = copy.deepcopy(self.model)
        self.plain_loss = copy.deepcopy(loss_function)
        self.plain_loss._forward_hooks.clear()
        self.plain_loss._forward_hooks_with_kwargs.clear()
        self.trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def of_outputs(self, outputs: Tensor) -> Tensor:
        """The mean loss."""
        loss: Tensor = self.plain_loss(outputs, self.targets) * self.factor
        return loss / SAMPLES if self.reduction == "sum" else loss

    def track(self, *tracked: quantities.Quantity, step: int = 0) -> Cockpit:
        cockpit = Cockpit(self.model, tracked, loss_reduction=self.reduction)
        loss = self.loss_function(self.model(self.inputs), self.targets) * self.factor
        tracked_backward(cockpit, step, loss)
        return cockpit

    def hessian_diagonal(self) -> Tensor:
        """``[D]``"""
        return dense_hessian(self.plain_model, self.of_outputs, self.inputs).diagonal()

    def ggn_diagonal(self) -> Tensor:
        """``[D]``"""
        return dense_ggn(self.plain_model, self.of_outputs, self.inputs).diagonal()

    def diagonal(self, kind: str) -> Tensor:
        return self.hessian_diagonal() if kind == "diag_h" else self.ggn_diagonal()

    def blocks(self, diagonal: Tensor) -> dict[str, float]:
        parts = diagonal.split([p.numel() for p in self.trainable.values()])
        return {n: float(part.sum()) for n, part in zip(self.trainable, parts, strict=True)}

    def second_moments(self) -> Tensor:
        """Σₙgₙⱼ²/N ``[D]``."""

        def contribution(outputs: Tensor, samples: slice) -> Tensor:
            one = self.plain_loss(outputs, self.targets[samples]) * self.factor
            return one / SAMPLES if self.reduction == "mean" else one

        scale = SAMPLES if self.reduction == "mean" else 1.0
        model = copy.deepcopy(self.plain_model).requires_grad_(True)
        gradients = per_sample_gradients_by_loop(model, self.inputs, contribution, scale)
        return flat({n: gradients[n] for n in self.trainable}).square().mean(0)


def assert_exact(found: dict[str, Any], case: Case, kind: str) -> None:
    diagonal = case.diagonal(kind)
    assert found["method"] == "exact"
    assert found["trace"] == found["low"] == found["high"]
    assert found["standard_error"] == 0
    assert found["trace"] == pytest.approx(float(diagonal.sum()), rel=1e-10)
    for name, trace in case.blocks(diagonal).items():
        assert found["parameters"][name]["trace"] == pytest.approx(trace, rel=1e-10, abs=1e-14)


OF_CASES = [
    *itertools.product(PIECEWISE_LINEAR, list(LOSSES), ("diag_h", "diag_ggn_exact")),
    *itertools.product(CURVED, list(LOSSES), ("diag_ggn_exact",)),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("network", "loss", "kind"), OF_CASES)
def test_traces_are_exact(network: str, loss: str, kind: Any, reduction: str) -> None:
    """Of the Hessian of piecewise linear networks, and of the Gauss-Newton matrix of others."""
    case = Case((PIECEWISE_LINEAR | CURVED)[network], LOSSES[loss](reduction))
    if network == "unused layer":
        case.trainable = {n: p for n, p in case.trainable.items() if n.startswith("used")}
        for model in (case.model, case.plain_model):
            model.spare.requires_grad_(False)
    cockpit = case.track(quantities.HessTrace(curvature=kind))
    assert_exact(cockpit.history["HessTrace"][0], case, kind)
    assert cockpit.history.notes == []


@pytest.mark.parametrize("kind", ["diag_h", "diag_ggn_exact"])
def test_factors_of_the_loss_count(kind: Any) -> None:
    case = Case(PIECEWISE_LINEAR["frozen layer"], nn.MSELoss(), 0.25)
    found = case.track(quantities.HessTrace(curvature=kind)).history["HessTrace"][0]
    assert_exact(found, case, kind)


@pytest.mark.parametrize("network", ["ReLU in place", "convolution"])
def test_dropout_has_the_mask_of_the_step(network: str) -> None:
    """The reference multiplies by that mask."""
    torch.manual_seed(0)
    layers = list(PIECEWISE_LINEAR[network]())
    dropout = nn.Dropout(0.4)
    model = nn.Sequential(*layers[:-1], dropout, layers[-1]).double()
    plain = copy.deepcopy(model)
    seen: list[Tensor] = []
    dropout.register_forward_hook(lambda m, i, o: seen.append((o != 0).double() / 0.6))
    loss_function = gradlens.extend(nn.CrossEntropyLoss())
    inputs, targets = torch.randn(SAMPLES, 4, dtype=torch.float64), torch.randint(3, (SAMPLES,))
    cockpit = Cockpit(model, [quantities.HessTrace()])
    tracked_backward(cockpit, 0, loss_function(model(inputs), targets))
    plain[-2] = Times(seen[0])
    loss_of = partial(nn.functional.cross_entropy, target=targets)
    truth = dense_hessian(plain, loss_of, inputs).trace()
    found = cockpit.history["HessTrace"][0]
    assert found["method"] == "exact"
    assert found["trace"] == pytest.approx(float(truth), rel=1e-10)
    assert len(seen) == 1


SHARED = nn.Linear(3, 3)
FIRST = torch.tensor([0])
ESTIMATED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own forward": (Residual, "it has native_layer_norm"),
    "sigmoid": (CURVED["nested sigmoid"], "it has sigmoid"),
    "GELU": (CURVED["GELU"], "it has gelu"),
    "batch normalisation": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        "it has native_batch_norm",
    ),
    "instance normalisation": (
        lambda: nn.Sequential(
            nn.Linear(4, 12), nn.Unflatten(1, (3, 4)), nn.InstanceNorm1d(3), nn.Flatten()
        ),
        "it has native_batch_norm",
    ),
    "shared parameter": (
        lambda: nn.Sequential(nn.Linear(4, 3), SHARED, nn.ReLU(), SHARED),
        "a parameter is multiplied by itself",
    ),
    "division": (Divided, "it has div"),
}


@pytest.mark.slow
@pytest.mark.parametrize("network", ESTIMATED)
def test_elsewhere_the_hessians_trace_is_estimated_and_the_record_says_why(network: str) -> None:
    build, reason = ESTIMATED[network]
    case = Case(build, nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match=f"(?s)diag_h is estimated.*{reason}"):
        cockpit = case.track(quantities.HessTrace(samples=200))
    found = cockpit.history["HessTrace"][0]
    assert found["method"] == "Hutchinson"
    diagonal = case.diagonal("diag_h")
    truths = {"": float(diagonal.sum()), **case.blocks(diagonal)}
    estimates = {"": found, **found["parameters"]}
    for name, truth in truths.items():
        error = max(estimates[name]["standard_error"], 1e-9)
        assert abs(estimates[name]["trace"] - truth) < 4.5 * error
        assert estimates[name]["low"] <= estimates[name]["trace"] <= estimates[name]["high"]
    assert any(reason.split(".*")[-1].replace("\\", "") in n.text for n in cockpit.history.notes)


def plain_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    "compute",
    [
        plain_loss,
        lambda o, t: gradlens.extend(nn.CrossEntropyLoss())(o, t) + 1e-3 * o.square().sum(),
        lambda o, t: gradlens.extend(nn.CrossEntropyLoss())(3 * o, t),
        lambda o, t: gradlens.extend(nn.CrossEntropyLoss(reduction="none"))(o, t).mean(),
        lambda o, t: gradlens.extend(nn.CrossEntropyLoss())(o, t.index_fill(0, FIRST, -100)),
        lambda o, t: gradlens.extend(nn.CrossEntropyLoss(weight=torch.rand(3).double()))(o, t),
        lambda o, t: gradlens.extend(nn.NLLLoss())(o.log_softmax(1), t),
    ],
)
def test_any_convex_loss_of_the_outputs(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    case = Case(PIECEWISE_LINEAR["ReLU in place"], nn.CrossEntropyLoss())
    cockpit = Cockpit(case.model, [quantities.HessTrace()])
    outputs = case.model(case.inputs)
    loss = compute(outputs, case.targets)
    truth = float((HessianOperator(loss, case.trainable) @ np.eye(43)).trace())
    tracked_backward(cockpit, 0, loss, info={"outputs": outputs})
    found = cockpit.history["HessTrace"][0]
    assert found["method"] == "exact"
    assert found["trace"] == pytest.approx(truth, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "loss"), [("nested sigmoid", "cross-entropy"), ("residual", "squared error")]
)
def test_intervals_of_sampled_diagonals_hold_the_truth(network: str, loss: str) -> None:
    """In 90 to 99 of 100 steps, which have seeds of their own."""
    case = Case((PIECEWISE_LINEAR | CURVED)[network], LOSSES[loss]("mean"))
    truth = float(case.ggn_diagonal().sum())
    quantity = quantities.HessTrace(curvature="diag_ggn_mc", samples=20)
    cockpit = Cockpit(case.model, [quantity])
    for step in range(100):
        loss = case.loss_function(case.model(case.inputs), case.targets)
        tracked_backward(cockpit, step, loss)
    found = cockpit.history["HessTrace"].values()
    assert all(record["method"] == "Monte Carlo" for record in found)
    assert sum(record["low"] <= truth <= record["high"] for record in found) in range(90, 100)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("network", "kind"),
    [
        *((each, "diag_ggn_exact") for each in ("convolution", "frozen layer", "residual")),
        *(("ReLU in place", each) for each in ("diag_h", "diag_ggn_exact")),
    ],
)
def test_takeuchis_criterion(network: str, kind: Any, reduction: str) -> None:
    case = Case((PIECEWISE_LINEAR | CURVED)[network], LOSSES["cross-entropy"](reduction))
    for epsilon in (1e-3, 1e-7):
        tic_diag, tic_trace = (
            each(curvature=kind, epsilon=epsilon)
            for each in (quantities.TICDiag, quantities.TICTrace)
        )
        history = case.track(tic_diag, tic_trace).history
        moments, diagonal = case.second_moments(), case.diagonal(kind)
        expected = float((moments / (diagonal + epsilon)).sum())
        assert history["TICDiag"][0] == pytest.approx(expected, rel=1e-9)
        expected = float(moments.sum() / (diagonal.sum() + epsilon))
        assert history["TICTrace"][0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.filterwarnings("ignore:.*is estimated, by Hutchinson")
def test_curvature_that_is_not_positive() -> None:
    """−(x²): concave in the outputs."""
    case = Case(PIECEWISE_LINEAR["linear"], nn.MSELoss(), factor=-1.0)
    cockpit = case.track(quantities.TICDiag(), quantities.TICTrace(), quantities.NormTest())
    assert "not positive at 15 of 15 elements" in cockpit.history["TICDiag"][0].reason
    assert "trace of the curvature is not positive" in cockpit.history["TICTrace"][0].reason
    assert math.isfinite(cockpit.history["NormTest"][0])


def test_zero_gradients_and_one_sample() -> None:
    case = Case(PIECEWISE_LINEAR["linear"], nn.MSELoss())
    case.inputs, case.targets = case.inputs[:1], case.model(case.inputs[:1]).detach()
    cockpit = case.track(quantities.TICDiag(), quantities.TICTrace(), quantities.HessTrace())
    assert cockpit.history["TICDiag"][0] == 0
    assert cockpit.history["TICTrace"][0] == 0
    assert cockpit.history["HessTrace"][0]["trace"] > 0


@pytest.mark.filterwarnings("ignore:.*is estimated, by Hutchinson")
@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_the_network(kind: Any) -> None:
    case = Case(PIECEWISE_LINEAR["linear"], nn.MSELoss())
    case.inputs[0, 0] = math.nan
    tracked = [quantities.HessTrace(curvature=kind), quantities.TICDiag(curvature=kind)]
    cockpit = case.track(*tracked)
    for value in (cockpit.history["HessTrace"][0], cockpit.history["TICDiag"][0]):
        assert isinstance(value, Undefined)
        assert "NaN" in value.reason


@pytest.mark.filterwarnings(INPUT_WITHOUT_GRADIENT)
@pytest.mark.parametrize("kind", KINDS)
def test_graph_extended_by_backpack_alone(kind: Any) -> None:
    """As in a program written for cockpit, which passes parameters and no model."""
    case = Case(PIECEWISE_LINEAR["frozen layer"], nn.CrossEntropyLoss())
    model = backpack.extend(copy.deepcopy(case.model))
    loss_function = backpack.extend(nn.CrossEntropyLoss())
    cockpit = Cockpit(model.parameters(), [quantities.HessTrace(curvature=kind)])
    tracked_backward(cockpit, 0, loss_function(model(case.inputs), case.targets))
    found, truth = cockpit.history["HessTrace"][0], float(case.diagonal(kind).sum())
    if kind == "diag_ggn_mc":
        assert found["method"] == "Monte Carlo"
        assert abs(found["trace"] - truth) < 4.5 * found["standard_error"]
    else:
        assert found["method"] == "exact"
        assert found["trace"] == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize("quantity", [quantities.HessTrace, quantities.TICDiag])
def test_unknown_curvature(quantity: Any) -> None:
    with pytest.raises(ValueError, match="curvature='diag' is none of 'diag_h', "):
        quantity(curvature="diag")


@pytest.mark.filterwarnings(INPUT_WITHOUT_GRADIENT, "ignore:.*is estimated, by Hutchinson")
@pytest.mark.parametrize("kind", KINDS)
def test_no_hook_of_others_runs_where_backpack_has_extended_the_model(kind: Any) -> None:
    """Neither one with a state, nor one that keeps the gradient of an output."""
    case = Case(CURVED["nested sigmoid"], nn.CrossEntropyLoss())
    gradients: list[torch.Tensor] = []
    model = backpack.extend(copy.deepcopy(case.model))
    loss_function = backpack.extend(nn.CrossEntropyLoss())
    cockpit = Cockpit(model.parameters(), [quantities.HessTrace(curvature=kind)])
    outputs = model(case.inputs)
    outputs.retain_grad()
    outputs.register_hook(gradients.append)
    loss = loss_function(outputs, case.targets)
    leaf = outputs.detach().requires_grad_()
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(leaf, case.targets), leaf)
    with cockpit(0, loss=loss):
        assert not gradients
        loss.backward()
    assert len(gradients) == 1
    torch.testing.assert_close(outputs.grad, expected, rtol=0, atol=0)
