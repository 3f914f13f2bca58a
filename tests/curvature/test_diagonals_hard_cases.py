"""Curvature diagonals where a network or loss isn't what it seems: the truth, or a reason."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import backpack
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from backpack.extensions import DiagHessian
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit, quantities
from gradlens.history.undefined import Undefined
from tests.cases.steps import tracked_backward

pytestmark = pytest.mark.filterwarnings("ignore:.*is estimated, by Hutchinson")

N = 6


@dataclass(frozen=True)
class Problem:
    """A model in float64, and how a step goes: outputs from it, and a loss from these.

    ``passed`` says whether the user passes the outputs to the context.
    """

    model: nn.Module
    outputs: Callable[[], Tensor]
    loss: Callable[[Tensor], Tensor]
    passed: bool = False

    def track(
        self, *tracked: quantities.Quantity, step: int = 0, reduction: Any = "mean", **info: Any
    ) -> Cockpit:
        cockpit = Cockpit(self.model, tracked, loss_reduction=reduction)
        outputs = self.outputs()
        loss = self.loss(outputs)
        passed = {"outputs": outputs} if self.passed else {}
        tracked_backward(cockpit, step, loss, info=passed | info)
        self.model.zero_grad()
        return cockpit

    def trace(self, kind: str, step: int = 0, **settings: Any) -> Any:
        quantity = quantities.HessTrace(curvature=kind, **{"samples": 100, **settings})
        return self.track(quantity, step=step).history["HessTrace"][step]

    def truth(self, kind: str) -> float:
        return self.trace_of_hessian() if kind == "diag_h" else self.trace_of_ggn()

    def trace_of_hessian(self) -> float:
        parameters = list(self.model.parameters())
        loss = self.loss(self.outputs())
        gradient = _flat(torch.autograd.grad(loss, parameters, create_graph=True))
        rows = [_row(entry, parameters) for entry in gradient]
        return float(torch.stack(rows).trace())

    def trace_of_ggn(self) -> float:
        parameters, outputs = list(self.model.parameters()), self.outputs()
        jacobian = torch.stack([_row(entry, parameters) for entry in outputs.flatten()])
        start = outputs.detach().flatten()
        hessian: Any = torch.autograd.functional.hessian(
            lambda flat: self.loss(flat.reshape(outputs.shape)), start
        )
        return float((jacobian.T @ hessian @ jacobian).trace())


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _row(entry: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    if not entry.requires_grad:
        return torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    found = torch.autograd.grad(entry, parameters, retain_graph=True, materialize_grads=True)
    return _flat(found)


class WeightUsedTwice(nn.Module):
    """Once by its layer, once by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(F.linear(hidden, self.first.weight)))


class Centred(WeightUsedTwice):
    """Samples meet inside."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden - hidden.mean(0))


class Residual(WeightUsedTwice):
    """Beyond BackPACK's rules."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + x)


def perceptron(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, width))


def piecewise_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def inputs(rows: int = N) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64)


def labels(rows: int = N) -> Tensor:
    return torch.randint(3, (rows,))


def cross_entropy(**settings: Any) -> nn.Module:
    return gradlens.extend(nn.CrossEntropyLoss(**settings))


def plain(model: nn.Module, loss: Callable[[Tensor], Tensor], **settings: Any) -> Problem:
    model, x = model.double(), inputs()
    return Problem(model, lambda: model(x), loss, **settings)


def zeros_into_dropout() -> Problem:
    first = nn.Linear(4, 5)
    nn.init.zeros_(first.weight)
    nn.init.zeros_(first.bias)
    model = nn.Sequential(first, nn.Dropout(0.5), nn.Linear(5, 3)).double()
    x, y, loss = inputs(), labels(), cross_entropy()

    def outputs() -> Tensor:
        torch.manual_seed(5)
        return model(x)

    return Problem(model, outputs, lambda o: loss(o, y))


def regulariser_of_zero() -> Problem:
    model, y, loss = piecewise_linear().double(), labels(), cross_entropy()
    bias: Any = model[0].bias  # type: ignore[index]
    nn.init.zeros_(bias)
    return plain(model, lambda o: loss(o, y) + 0.1 * bias.square().sum())


def of(model: Callable[[], nn.Module]) -> Callable[[], Problem]:
    def build() -> Problem:
        y, loss = labels(), cross_entropy()
        return plain(model(), lambda o: loss(o, y))

    return build


def soft_targets() -> Problem:
    y, loss = 2 * torch.rand(N, 3, dtype=torch.float64), cross_entropy()
    return plain(perceptron(), lambda o: loss(o, y))


def coupled_samples() -> Problem:
    model, x, y = Residual().double(), inputs(12), labels(4)
    return Problem(
        model,
        lambda: model(x),
        lambda o: F.cross_entropy(o[:4], y) + F.mse_loss(o[4:8], o[8:]),
        passed=True,
    )


def function_of_the_loss() -> Problem:
    """Its value is that of the loss module times the gradient there, as if it were linear."""
    y, loss = labels(), cross_entropy()

    def relative(o: Tensor) -> Tensor:
        found = loss(o, y)
        return 1 + (found / found.detach()).log()

    return plain(perceptron(), relative)


def mixed_up() -> Problem:
    y, loss = labels(), cross_entropy()
    return plain(perceptron(), lambda o: 0.3 * loss(o, y) + 0.7 * loss(o, y.flip(0)))


def mean_and_variance() -> Problem:
    y, loss = torch.randn(N, 1, dtype=torch.float64), nn.GaussianNLLLoss()
    return plain(perceptron(2), lambda o: loss(o[:, :1], y, F.softplus(o[:, 1:])))


def two_batches(function: bool = False) -> Problem:
    """Compared with each other, or one of them with a target by a function."""
    model, both = perceptron().double(), inputs(2 * N)
    y, loss = torch.randn(N, 3, dtype=torch.float64), nn.MSELoss()

    def compare(o: Tensor) -> Tensor:
        first, second = o.split(N)
        if function:
            return loss(first, y) + F.mse_loss(second, y)
        return loss(first, second)

    return Problem(model, lambda: model(both), compare)


def two_calls() -> Problem:
    """As of a discriminator."""
    model, both, loss = perceptron(1).double(), inputs(2 * N), nn.MSELoss()
    one = torch.ones(N, 1, dtype=torch.float64)
    return Problem(model, lambda: model(both), lambda o: loss(o[:N], one) + loss(o[N:], -one))


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradients[0]


class OnceDifferentiable(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(super().forward(x))


HARD: dict[str, tuple[Callable[[], Problem], dict[str, str]]] = {
    "zeros into dropout": (
        zeros_into_dropout,
        {"diag_h": "exact", "diag_ggn_exact": "exact", "diag_ggn_mc": "Monte Carlo"},
    ),
    "regulariser of zero": (regulariser_of_zero, {"diag_h": "Hutchinson"}),
    "weight used twice": (
        of(WeightUsedTwice),
        {"diag_ggn_exact": "exact", "diag_ggn_mc": "Monte Carlo"},
    ),
    "samples that meet": (
        of(Centred),
        {"diag_ggn_exact": "Hutchinson", "diag_ggn_mc": "Monte Carlo"},
    ),
    "soft targets": (soft_targets, {"diag_ggn_exact": "exact", "diag_ggn_mc": "Monte Carlo"}),
    "coupled samples": (
        coupled_samples,
        {"diag_ggn_exact": "Hutchinson", "diag_ggn_mc": "Hutchinson"},
    ),
    "function of the loss": (function_of_the_loss, {"diag_ggn_mc": "Hutchinson"}),
    "mixed up": (mixed_up, {"diag_ggn_exact": "exact", "diag_ggn_mc": "Monte Carlo"}),
    "mean and variance": (mean_and_variance, {"diag_ggn_exact": "Hutchinson"}),
    "two batches": (two_batches, {"diag_ggn_exact": "Hutchinson"}),
    "two batches, one by a function": (
        lambda: two_batches(function=True),
        {"diag_ggn_exact": "exact"},
    ),
    "two calls": (two_calls, {"diag_ggn_exact": "exact", "diag_ggn_mc": "Monte Carlo"}),
    # The network's first derivatives are enough.
    "once differentiable": (
        of(OnceDifferentiable),
        {"diag_ggn_exact": "exact", "diag_ggn_mc": "Monte Carlo"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, (_, kinds) in HARD.items() for kind in kinds]
)
def test_traces_are_those_of_the_whole_loss(name: str, kind: str) -> None:
    """At every step, and by the expected method."""
    build, methods = HARD[name]
    torch.manual_seed(0)
    problem = build()
    truth = problem.truth(kind)
    for step in range(2):
        found = problem.trace(kind, step)
        assert found["method"] == methods[kind]
        tolerance = max(4.5 * found["standard_error"], 1e-9 * abs(truth))
        assert abs(found["trace"] - truth) < tolerance


def regularised() -> Problem:
    model, y, loss = perceptron().double(), labels(), cross_entropy()
    weight: Any = model[0].weight  # type: ignore[index]
    return plain(model, lambda o: loss(o, y) + 0.1 * weight.square().sum())


def not_a_number() -> Problem:
    y, loss = labels(), cross_entropy()
    model, x = Residual().double(), inputs().index_fill(0, torch.tensor([0]), math.nan)
    return Problem(model, lambda: model(x), lambda o: loss(o, y))


def functional() -> Problem:
    y = labels()
    return plain(Residual(), lambda o: F.cross_entropy(o, y))


UNDEFINED: dict[str, tuple[Callable[[], Problem], str]] = {
    "regulariser": (regularised, "depends on 0.weight in other ways"),
    "NaN": (not_a_number, "contains NaN"),
}


@pytest.mark.filterwarnings("ignore:.*the samples' gradients don't add up")
@pytest.mark.filterwarnings("ignore:.*per-sample gradients cover")
@pytest.mark.parametrize("kind", ["diag_ggn_exact", "diag_ggn_mc"])
@pytest.mark.parametrize("name", UNDEFINED)
def test_what_is_undefined_is_a_nan_with_a_reason(name: str, kind: Any) -> None:
    build, reason = UNDEFINED[name]
    torch.manual_seed(0)
    tracked = [quantities.HessTrace(curvature=kind), quantities.TICDiag(curvature=kind)]
    history = build().track(*tracked, quantities.NormTest()).history
    for value in (history["HessTrace"][0], history["TICDiag"][0]):
        assert isinstance(value, Undefined)
        assert re.search(reason, value.reason)
        assert "\n" not in value.reason
    assert 0 in history["NormTest"]
    why = history.coverage("NormTest", 0).missing.values()
    meet = any("samples meet" in each for each in why)
    assert meet == (name == "two batches"), "rows are compared with each other there alone"


@pytest.mark.parametrize(
    ("passed", "reason"),
    [
        (lambda o: (o,), "is a tuple: pass the one tensor"),
        (lambda o: o.detach(), "have no graph"),
        (lambda o: o.clone(), "doesn't depend on the outputs"),
    ],
)
def test_outputs_that_are_none(passed: Callable[[Tensor], Any], reason: str) -> None:
    problem = functional()
    cockpit = Cockpit(problem.model, [quantities.HessTrace(curvature="diag_ggn_exact")])
    outputs = problem.outputs()
    tracked_backward(cockpit, 0, problem.loss(outputs), info={"outputs": passed(outputs)})
    assert reason in cockpit.history["HessTrace"][0].reason


def test_what_a_users_outputs_leave_out_is_noted() -> None:
    torch.manual_seed(0)
    model, y, loss = perceptron().double(), labels(), cross_entropy()
    weight: Any = model[0].weight  # type: ignore[index]
    problem = plain(model, lambda o: loss(o, y) + 0.1 * weight.square().sum(), passed=True)
    with pytest.warns(UserWarning, match="depends on 0.weight in other ways than.*doesn't enter"):
        found = problem.trace("diag_ggn_exact")
    assert found["method"] == "exact"
    expected = Problem(model, problem.outputs, lambda o: loss(o, y)).trace_of_ggn()
    assert found["trace"] == pytest.approx(expected, rel=1e-10)


def test_log_probabilities_have_no_gauss_newton_matrix_of_their_own() -> None:
    """The outputs are the logits that the model has returned, or there are none."""
    y, loss = labels(), gradlens.extend(nn.NLLLoss())
    problem = plain(perceptron(), lambda o: loss(o.log_softmax(1), y))
    found = problem.trace("diag_ggn_exact")
    assert found["method"] == "exact"
    assert found["trace"] == pytest.approx(problem.trace_of_ggn(), rel=1e-10)
    problem = plain(nn.Sequential(perceptron(), nn.LogSoftmax(1)), lambda o: loss(o, y))
    reason = problem.trace("diag_ggn_exact").reason
    assert re.search("linear in what the model has returned.*the logits", reason)


# N under a sum loss


class Tokens(nn.Module):
    """[N, T, 4] to [N, T, 3], or with T folded into N."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.first, self.last, self.flat = nn.Linear(4, 5), nn.Linear(5, 3), flat

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden.flatten(0, 1) if self.flat else hidden)


@pytest.mark.filterwarnings("ignore:.*per-sample gradients")
@pytest.mark.parametrize("kind", ["diag_h", "diag_ggn_exact"])
@pytest.mark.parametrize(
    ("flat", "passed", "n"), [(False, {}, 4), (True, {}, 4), (True, {"batch_size": 4}, 4)]
)
@pytest.mark.slow
def test_all_matrices_of_a_sum_loss_have_one_n(
    flat: bool, passed: dict[str, int], n: int, kind: Any
) -> None:
    torch.manual_seed(0)
    model, x, y = Tokens(flat).double(), torch.randn(4, 3, 4).double(), labels(12)
    loss = cross_entropy(reduction="sum")
    problem = Problem(model, lambda: model(x).reshape(-1, 3), lambda o: loss(o, y))
    quantity = quantities.HessTrace(curvature=kind, samples=300)
    found = problem.track(quantity, reduction="sum", **passed).history["HessTrace"][0]
    tolerance = max(4.5 * found["standard_error"], 1e-9)
    assert abs(found["trace"] - problem.truth(kind) / n) < tolerance


def test_a_batch_size_that_the_loss_contradicts_is_refused() -> None:
    y, loss = labels(), cross_entropy(reduction="sum")
    problem = plain(perceptron(), lambda o: loss(o, y))
    match = (
        "sum loss is divided by the number of samples: N = 60 by batch_size=, .* of shape .6, 3."
    )
    found = problem.track(quantities.HessTrace(), reduction="sum", batch_size=60)
    assert re.search(match, found.history["HessTrace"][0].reason)


# Networks that lost the run


class WithItsLoss(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.3))

    def forward(self) -> Tensor:
        return self.factor * 1.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = Scale(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale()


def with_its_loss() -> Problem:
    model, y = WithItsLoss(), labels()
    return plain(model, lambda o: model.criterion(o, y))


@pytest.mark.parametrize("kind", ["diag_h", "diag_ggn_exact", "diag_ggn_mc"])
@pytest.mark.parametrize("build", [with_its_loss, of(Scaled)])
def test_outputs_without_a_batch_axis(build: Callable[[], Problem], kind: str) -> None:
    torch.manual_seed(0)
    problem = build()
    found = problem.trace(kind)
    tolerance = max(4.5 * found["standard_error"], 1e-9)
    assert abs(found["trace"] - problem.truth(kind)) < tolerance


@pytest.mark.parametrize("kind", ["diag_h", "diag_ggn_exact", "diag_ggn_mc"])
@pytest.mark.parametrize("network", [perceptron, Residual])
@pytest.mark.slow
def test_autocast(network: Callable[[], nn.Module], kind: Any) -> None:
    torch.manual_seed(0)
    model, loss_function, x, y = network(), cross_entropy(), inputs(), labels()
    cockpit = Cockpit(model, [quantities.HessTrace(curvature=kind, samples=100)])
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_function(model(x.float()), y)
    tracked_backward(cockpit, 0, loss)
    found = cockpit.history["HessTrace"][0]
    model = model.double()
    truth = Problem(model, lambda: model(x), lambda o: F.cross_entropy(o, y)).truth(kind)
    assert abs(found["trace"] - truth) < 4.5 * found["standard_error"] + 0.03 * truth


# Training as it was


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("tracked", [[], [quantities.HessTrace()]])
def test_results_of_a_users_own_extension_stay(tracked: list[quantities.Quantity]) -> None:
    y, loss = labels(), backpack.extend(nn.CrossEntropyLoss())
    problem = plain(backpack.extend(perceptron()), lambda o: loss(o, y))
    cockpit = Cockpit(problem.model, tracked)
    loss_now = problem.loss(problem.outputs())
    with cockpit(0, DiagHessian(), loss=loss_now):
        loss_now.backward()
    found = sum(float(p.diag_h.sum()) for p in problem.model.parameters())  # type: ignore[attr-defined]
    assert found == pytest.approx(problem.trace_of_hessian(), rel=1e-10)


# Takeuchi's criterion


def test_criterion_of_a_model_that_was_never_extended() -> None:
    torch.manual_seed(0)
    problem = functional()
    found = []
    for params in (problem.model.parameters(), gradlens.extend(problem.model)):
        cockpit = Cockpit(params, [quantities.TICDiag(curvature="diag_ggn_exact")])
        outputs = problem.outputs()
        loss = problem.loss(outputs)
        tracked_backward(cockpit, 0, loss, info={"outputs": outputs, "batch_size": N})
        found.append(cockpit.history["TICDiag"][0])
        problem.model.zero_grad()
    assert isinstance(found[0], float)
    assert found[0] == pytest.approx(found[1], rel=1e-9)
