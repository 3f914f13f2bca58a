"""Landscapes equal plain loops over moved copies of the model, which itself stays as it is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradlens.curvature import HessianOperator, Probe, eigenpairs
from gradlens.history.undefined import Undefined
from gradlens.landscape import (
    Direction,
    direction_between,
    eigenvector_directions,
    loss_along,
    loss_on_plane,
    principal_directions,
    random_direction,
)
from gradlens.numerics.unavailable import UnavailableError
from tests.cases.curvature_cases import Problem, Reduction, build

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
AT = np.array([-1.0, -0.3, 0.0, 0.5])


class Dropped(nn.Module):
    """Normalisation over the batch, dropout, and a weight of its own size and direction."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(nn.functional.dropout(hidden, training=self.training))


def dropped() -> Problem:
    """A problem whose model is in train mode, with statistics that aren't the initial ones."""
    problem = build("perceptron", "cross-entropy")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Dropped().double()
        model(problem.inputs)
    return Problem(model, problem.batches, problem.loss_of)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "perceptron": lambda: build("perceptron", "mse"),
    "convolutional": lambda: build("convolutional", "bce"),
    "recurrent": lambda: build("recurrent", "cross-entropy"),
    "normalised": lambda: build("normalised", "cross-entropy"),
    "tied": lambda: build("tied", "mse"),
    "frozen": lambda: build("frozen", "cross-entropy"),
    "dropped": dropped,
}


def probe_of(problem: Problem, reduction: Reduction = "mean") -> Probe:
    return Probe(problem.batches, problem.loss_of(reduction), loss_reduction=reduction)


def everywhere(model: nn.Module, seed: int = 0) -> Direction:
    """A direction in which everything that requires a gradient moves."""
    return random_direction(model, seed, biases_and_norms=True)


def loss_at(
    problem: Problem, *moves: tuple[float, Direction], reduction: Reduction = "mean"
) -> float:
    """The mean over samples of the loss, of a copy of the model in eval mode that has moved."""
    model = copy.deepcopy(problem.model).eval()
    entries = model.state_dict()
    with torch.no_grad():
        for distance, direction in moves:
            for name, part in direction.parts.items():
                entries[name] += distance * part
        loss = float(problem.loss_of(reduction)(model(problem.inputs), problem.targets))
    return loss / (len(problem.inputs) if reduction == "sum" else 1)


# Equal to plain loops ---------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_losses_are_those_of_moved_copies(name: str, reduction: Reduction) -> None:
    problem = PROBLEMS[name]()
    probe, model = probe_of(problem, reduction), problem.model
    first, second = everywhere(model), everywhere(model, 1)
    line = loss_along(model, probe, first, AT)
    expected = [loss_at(problem, (a, first), reduction=reduction) for a in AT]
    np.testing.assert_allclose(line.losses, expected, **CLOSE)
    assert line.loss == pytest.approx(loss_at(problem, reduction=reduction), rel=1e-12)
    plane = loss_on_plane(model, probe, (first, second), (AT, AT[1:]))
    expected_plane = [
        [loss_at(problem, (a, first), (b, second), reduction=reduction) for b in AT[1:]] for a in AT
    ]
    np.testing.assert_allclose(plane.losses, expected_plane, **CLOSE)
    np.testing.assert_array_equal(plane.losses[:, 1], line.losses)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["perceptron", "normalised", "tied", "frozen"])
def test_the_parabola_is_that_of_differences(name: str, reduction: Reduction) -> None:
    problem = PROBLEMS[name]()
    direction = everywhere(problem.model)
    line = loss_along(problem.model, probe_of(problem, reduction), direction, AT)
    step = 1e-4
    low, middle, high = (
        loss_at(problem, (a, direction), reduction=reduction) for a in (-step, 0.0, step)
    )
    assert line.slope == pytest.approx((high - low) / (2 * step), rel=1e-5)
    assert line.curvature == pytest.approx((high - 2 * middle + low) / step**2, rel=1e-3)
    a = line.distances
    found = line.loss + line.slope * a + line.curvature * a**2 / 2
    np.testing.assert_allclose(line.parabola, found)


def test_in_train_mode_batches_are_normalised_by_themselves() -> None:
    problem = build("normalised", "cross-entropy")
    data = [(problem.inputs[:4], problem.targets[:4]), (problem.inputs[4:], problem.targets[4:])]
    problem.model.train()
    direction = random_direction(problem.model)
    found = loss_along(
        problem.model, Probe(data, nn.CrossEntropyLoss(), training=True), direction, AT
    )
    for distance, loss in zip(AT, found.losses, strict=True):
        model = copy.deepcopy(problem.model)
        for name, part in direction.parts.items():
            model.state_dict()[name] += distance * part
        losses = [nn.functional.cross_entropy(model(x), y).detach() for x, y in data]
        assert loss == pytest.approx(float(sum(losses)) / 2, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    problem = build("perceptron", "mse")
    model = problem.model.to(dtype)
    data = [(inputs.to(dtype), targets.to(dtype)) for inputs, targets in problem.batches]
    direction = random_direction(model)
    assert {part.dtype for part in direction.parts.values()} == {torch.float32}
    found = loss_along(model, Probe(data, nn.MSELoss()), direction, AT, parabola=False)
    for distance, loss in zip(AT, found.losses, strict=True):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name, part in direction.parts.items():
                parameter = moved.get_parameter(name)
                parameter.copy_(parameter.float() + float(distance) * part)
            losses = [len(x) * float(nn.functional.mse_loss(moved(x), y)) for x, y in data]
        assert loss == pytest.approx(sum(losses) / len(problem.inputs), rel=1e-6)


def test_autocast_and_missing_gradients_make_no_difference() -> None:
    problem = build("perceptron", "cross-entropy")
    model = problem.model.float()
    data = [(inputs.float(), targets) for inputs, targets in problem.batches]

    def found() -> list[Any]:
        line = loss_along(model, Probe(data, nn.CrossEntropyLoss()), random_direction(model), AT)
        return [*line.losses, line.slope, line.curvature]

    plain = found()
    with torch.autocast("cpu"), torch.no_grad():
        assert found() == plain


def test_losses_without_a_finite_number_are_kept() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1)
    data = [(torch.ones(2, 1), torch.zeros(2, 1))]
    direction = Direction({"weight": torch.ones(1, 1)})
    for function, expected in (
        (lambda x, _: x.log().mean(), [np.nan, -np.inf, 0.0]),
        (lambda x, _: (1 / x).mean(), [-1.0, np.inf, 1.0]),
    ):
        found = loss_along(model, Probe(data, function), direction, [-2.0, -1.0, 0.0])
        np.testing.assert_array_equal(found.losses, expected)


# Between states and along runs ------------------------------------------------------------------


def trained(problem: Problem, steps: int = 4) -> list[dict[str, Tensor]]:
    """The states of a short training."""
    optimizer = torch.optim.SGD([p for p in problem.model.parameters() if p.requires_grad], lr=0.5)
    states = [copy.deepcopy(problem.model.state_dict())]
    for _ in range(steps):
        optimizer.zero_grad()
        problem.loss_of("mean")(problem.model(problem.inputs), problem.targets).backward()
        optimizer.step()
        states.append(copy.deepcopy(problem.model.state_dict()))
    return states


@pytest.mark.parametrize("name", ["normalised", "tied", "frozen"])
@pytest.mark.slow
def test_the_ends_of_a_line_between_states_are_the_states(name: str) -> None:
    problem = PROBLEMS[name]()
    problem.model.train()
    states = trained(problem)
    direction = direction_between(states[0], states[-1])
    found = loss_along(
        problem.model, probe_of(problem), direction, [0.0, 0.5, 1.0], origin=states[0]
    )
    between = {
        key: (states[0][key] + states[-1][key]) / 2 if end.is_floating_point() else end
        for key, end in states[-1].items()
    }
    for loss, state in zip(found.losses, (states[0], between, states[-1]), strict=True):
        problem.model.load_state_dict(state)
        assert loss == pytest.approx(loss_at(problem), rel=1e-12)
    moves_buffers = name == "normalised"
    assert isinstance(found.slope, Undefined) is moves_buffers
    if moves_buffers:
        assert "2 other tensors" in found.slope.reason


@pytest.mark.slow
def test_a_trajectory_is_projected_on_the_plane() -> None:
    problem = build("perceptron", "cross-entropy")
    states = trained(problem)
    directions = direction_between(states[-1], states[0]), direction_between(states[-1], states[2])
    plane = loss_on_plane(problem.model, probe_of(problem), directions, trajectory=states)
    np.testing.assert_allclose(plane.path[[0, 2, 4]], [[1, 0], [0, 1], [0, 0]], atol=1e-9)
    flat = np.array([flat_of(problem, state) for state in states]) - flat_of(problem, states[-1])
    basis, *_ = np.linalg.qr(flat[[0, 2]].T)
    assert plane.in_plane == pytest.approx(np.square(flat @ basis).sum() / np.square(flat).sum())
    assert plane.first[0] < 0 < 1 < plane.first[-1]


def flat_of(problem: Problem, state: dict[str, Tensor]) -> Any:
    return np.concatenate([state[name].numpy().ravel() for name in problem.parameters])


def test_principal_directions_are_those_of_the_states() -> None:
    problem = build("normalised", "cross-entropy")
    problem.model.train()
    states = trained(problem)
    directions = principal_directions(problem.model, states)
    flat = np.array([flat_of(problem, state) for state in states[:-1]])
    flat -= flat_of(problem, states[-1])
    _, sizes, expected = np.linalg.svd(flat)
    for direction, vector in zip(directions, expected, strict=False):
        found = flat_of(problem, dict(direction.parts))
        assert abs(found @ vector) == pytest.approx(1, rel=1e-9)
        assert found @ flat[0] > 0
        assert direction.parts["1.running_mean"].any()
    probe = probe_of(problem)
    plane = loss_on_plane(problem.model, probe, directions, (AT, AT), trajectory=states)
    assert plane.in_plane == pytest.approx(np.square(sizes[:2]).sum() / np.square(sizes).sum())


# Directions -------------------------------------------------------------------------------------


def test_random_directions_have_the_filters_norms() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.LayerNorm([3, 4]), nn.Linear(12, 5)
    )
    names = {"0.weight": 3, "4.weight": 5}
    found = random_direction(model)
    assert {*found.parts} == {*names}
    for name, count in names.items():
        norms = [p.detach().reshape(count, -1).norm(dim=1)
                 for p in (found.parts[name], model.get_parameter(name))]  # fmt: skip
        torch.testing.assert_close(*norms)
    every = everywhere(model)
    assert {*every.parts} == {name for name, _ in model.named_parameters()}
    assert every.parts["3.weight"].shape == (3, 4)
    torch.testing.assert_close(every.parts["0.bias"].abs(), model[0].bias.detach().abs())
    model[0].requires_grad_(False)
    assert {*random_direction(model).parts} == {"4.weight"}


def test_random_directions_depend_on_the_seed_alone() -> None:
    model = nn.Linear(3, 4).double()
    torch.manual_seed(0)
    first = random_direction(model, 1).parts["weight"]
    torch.manual_seed(1)
    torch.testing.assert_close(random_direction(model, 1).parts["weight"], first, rtol=0, atol=0)
    assert not torch.allclose(random_direction(model, 2).parts["weight"], first)
    single = random_direction(model.float(), 1).parts["weight"]
    torch.testing.assert_close(single.double(), first, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_along_an_eigenvector_the_curvature_is_its_eigenvalue() -> None:
    problem = build("perceptron", "cross-entropy")
    matrix = HessianOperator.over_data(problem.model, problem.loss_of("mean"), problem.batches)
    values = eigenpairs(matrix, 2, "smallest", tolerance=1e-9).values
    directions = eigenvector_directions(matrix, 2, "smallest", tolerance=1e-9)
    for value, direction in zip(values, directions, strict=True):
        found = loss_along(problem.model, probe_of(problem), direction, AT)
        assert found.curvature == pytest.approx(value, rel=1e-6)
        assert f"λ = {value:.3g}".replace("-", "−") in found.axis
        assert "±" not in found.axis
    (rough,) = eigenvector_directions(matrix, max_products=4)
    assert "±" in rough.label


# The model afterwards ---------------------------------------------------------------------------


def everything(model: nn.Module) -> list[Any]:
    """All that training depends on, as bytes and identities."""
    found: list[Any] = [
        random.getstate(),
        str(np.random.get_state()),
        torch.get_rng_state().numpy(),
    ]
    found[-1] = found[-1].tobytes()
    for tensor in [*model.parameters(), *model.buffers()]:
        grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.numpy().tobytes())
        found.append((id(tensor), tensor.data_ptr(), tensor.detach().numpy().tobytes(), grad))
        found.append((tensor.requires_grad, tensor._version))
    found += [module.training for module in model.modules()]
    return found


class Failing(nn.Module):
    """A loss that raises in one of its calls, or in none."""

    def __init__(self, call: int, error: BaseException) -> None:
        super().__init__()
        self.call, self.error = call, error

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.call -= 1
        random.random(), np.random.rand(), torch.rand(1)
        if self.call == 0:
            raise self.error
        return nn.functional.cross_entropy(outputs, targets)


def on_line(model: nn.Module, probe: Probe, states: list[dict[str, Tensor]]) -> None:
    loss_along(model, probe, random_direction(model), AT)


def on_plane(model: nn.Module, probe: Probe, states: list[dict[str, Tensor]]) -> None:
    directions = principal_directions(model, states)
    loss_on_plane(model, probe, directions, (AT[:2], AT[2:]), trajectory=states)


@pytest.mark.parametrize("error", [None, RuntimeError("failed"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["dropped", "frozen", "tied"])
def test_the_model_is_as_before(name: str, error: BaseException | None) -> None:
    problem = dropped() if name == "dropped" else build(name, "cross-entropy")
    model = problem.model
    states = trained(problem, 2)
    before = everything(model)
    for call in (1, 9, 12, 18) if error else (0,):
        for work in (on_line, on_plane):
            probe = Probe(problem.batches, Failing(call, error or RuntimeError()))
            with nullcontext() if error is None else pytest.raises(type(error)):
                work(model, probe, states)
            assert everything(model) == before


def test_directions_and_origins_may_be_the_models_own_tensors() -> None:
    problem = build("perceptron", "mse")
    model = problem.model
    own = Direction(dict(model.named_parameters()))
    copied = Direction({name: p.detach().clone() for name, p in model.named_parameters()})
    losses = [
        loss_along(model, probe_of(problem), direction, AT, origin=origin).losses
        for direction, origin in ((own, model.state_dict()), (copied, None))
    ]
    np.testing.assert_array_equal(*losses)


# What is refused --------------------------------------------------------------------------------


def part(**parts: Any) -> Direction:
    return Direction({name: torch.as_tensor(value) for name, value in parts.items()})


MODEL = nn.Linear(2, 1, bias=False)
DATA = [(torch.ones(3, 2), torch.zeros(3, 1))]
STATE = MODEL.state_dict()
STILL = random_direction(MODEL)


def along(*arguments: Any, model: nn.Module = MODEL, data: Any = DATA, **options: Any) -> Any:
    return loss_along(model, Probe(data, nn.MSELoss()), *arguments, **options)


def across(*directions: Direction, **options: Any) -> Any:
    return loss_on_plane(MODEL, Probe(DATA, nn.MSELoss()), directions, **options)


def in_train_mode() -> Any:
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout())
    return loss_along(model, Probe(DATA, nn.MSELoss(), training=True), part(**{"0.bias": [1.0]}))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown name": (lambda: along(part(wieght=[[1.0, 1]])), "did you mean weight"),
    "other shape": (lambda: along(part(weight=[1.0, 1])), "'weight' has the shape"),
    "integers": (lambda: along(part(weight=[[1, 1]])), "'weight', which is torch.int64"),
    "an integer buffer": (
        lambda: along(part(num_batches_tracked=1.0), model=nn.BatchNorm1d(2)),
        "'num_batches_tracked', which is torch.int64",
    ),
    "NaN": (lambda: along(part(weight=[[1, np.nan]])), "NaN or Inf for 'weight'"),
    "zero": (lambda: along(part(weight=[[0.0, 0]])), "is zero"),
    "a state of later": (lambda: along(direction_between(STATE, STATE)), "copy.deepcopy"),
    "no batches": (lambda: along(STILL, data=[]), "the data has no batches"),
    "descending distances": (lambda: along(STILL, [1.0, 0.0]), "two ascending numbers"),
    "NaN as a distance": (lambda: along(STILL, [1.0, np.nan]), "two ascending numbers"),
    "an origin with other keys": (
        lambda: along(STILL, origin={"module.weight": STATE["weight"]}),
        "origin has other entries than the model: 'weight' is missing, 'module.weight'",
    ),
    "a trajectory of another shape": (
        lambda: across(
            STILL, random_direction(MODEL, 1), trajectory=[STATE, {"weight": torch.ones(2, 2)}]
        ),
        r"shape \[2, 2\] in trajectory\[1\], and \[1, 2\] in the model",
    ),
    "parallel directions": (lambda: across(STILL, STILL), "parallel"),
    "states with other keys": (
        lambda: direction_between(STATE, {"weight": STATE["weight"], "bias": torch.ones(1)}),
        "the first state has other entries than the second: 'bias' is missing",
    ),
    "integers that differ": (
        lambda: direction_between({"a": torch.tensor([1, 2])}, {"a": torch.tensor([1, 3])}),
        "'a' is torch.int64 and differs",
    ),
    "too few states": (lambda: principal_directions(MODEL, [STATE]), "span 0 dimensions"),
    "no states": (lambda: principal_directions(MODEL, []), "span 0 dimensions"),
    "states that are one": (lambda: principal_directions(MODEL, [STATE] * 4), "deepcopy"),
    "nothing that moves": (lambda: random_direction(nn.BatchNorm1d(3)), "nothing would move"),
    "complex parameters": (
        lambda: random_direction(nn.Linear(2, 2, dtype=torch.complex64)), "'weight' is complex"
    ),
    "dropout in train mode": (in_train_mode, "active dropout"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused(case: str) -> None:
    work, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        work()


def test_tied_tensors_have_one_value() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    probe = Probe([(torch.ones(1, 2), torch.ones(1, 2))], nn.MSELoss())
    one, other = torch.ones(2, 2), torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight', which are one tensor"):
        loss_along(model, probe, Direction({"0.weight": one, "1.weight": other}))
    named = [Direction({name: one}) for name in ("0.weight", "1.weight")]
    both = Direction({"0.weight": one, "1.weight": one})
    losses = [loss_along(model, probe, each, AT).losses for each in (*named, both)]
    np.testing.assert_array_equal(losses[0], losses[1])
    np.testing.assert_array_equal(losses[0], losses[2])


def test_eigenvectors_of_a_matrix_without_products_are_unavailable() -> None:
    weight = nn.Parameter(torch.ones(2))
    matrix = HessianOperator((weight - 1).abs().sqrt().sum(), {"weight": weight})
    with pytest.raises(UnavailableError, match="NaN or Inf"):
        eigenvector_directions(matrix)


def test_there_is_no_parabola_where_it_was_not_asked_for_or_cannot_be_had() -> None:
    probe = Probe(DATA, nn.MSELoss())
    found = loss_along(MODEL, probe, STILL, parabola=False)
    assert isinstance(found.slope, Undefined)
    assert np.isnan(found.parabola).all()
    frozen = nn.Linear(2, 1, bias=False).requires_grad_(False)
    found = loss_along(frozen, probe, STILL)
    assert "1 other tensors" in found.slope.reason
    assert np.isfinite(found.losses).all()
