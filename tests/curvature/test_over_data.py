"""Operators over data equal the dense matrices of all samples, and bad data is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradlens.curvature import (
    CurvatureOperator,
    Eigenpairs,
    EmpiricalFisherOperator,
    FisherOperator,
    GGNOperator,
    GradCovarianceOperator,
    HessianOperator,
    JacobianOperator,
    eigenpairs,
    frobenius_norm,
    hutchinson,
    hutchinson_diagonal,
    spectral_density,
)
from gradlens.curvature import operator as matrices
from gradlens.curvature.operator import VECTOR_BYTES
from gradlens.numerics.unavailable import UnavailableError
from tests.cases import curvature_cases
from tests.cases.curvature_cases import LOSSES, MODELS, Problem, Reduction, build
from tests.cases.row_cases import Net

with warnings.catch_warnings():
    # It compiles with torch.jit.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

CLOSE = {"rtol": 1e-9, "atol": 1e-12}

CASES = [(model, "cross-entropy") for model in MODELS] + [
    ("perceptron", "mse"),
    ("convolutional", "bce"),
    ("tied", "mse"),
]

OPERATORS: dict[str, Any] = {
    "hessian": HessianOperator,
    "ggn": GGNOperator,
    "fisher": FisherOperator,
    "empirical-fisher": EmpiricalFisherOperator,
    "covariance": GradCovarianceOperator,
}

DENSE: dict[str, Callable[[Problem, Reduction], Tensor]] = {
    "hessian": curvature_cases.dense_hessian,
    "ggn": curvature_cases.dense_ggn,
    "empirical-fisher": curvature_cases.dense_empirical_fisher,
    "covariance": curvature_cases.dense_covariance,
}


def over_data(
    kind: str, problem: Problem, reduction: Reduction = "mean", **options: Any
) -> CurvatureOperator:
    loss = problem.loss_of(reduction)
    return OPERATORS[kind].over_data(
        problem.model, loss, problem.batches, loss_reduction=reduction, **options
    )


def matrix_of(operator: CurvatureOperator) -> NDArray[Any]:
    return operator @ np.eye(operator.shape[1])


@pytest.fixture(params=["mean", "sum"])
def reduction(request: pytest.FixtureRequest) -> Reduction:
    return request.param


# Equal to dense matrices ------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "loss"), CASES)
@pytest.mark.parametrize("kind", DENSE)
def test_matrices_equal_those_of_all_samples_at_once(kind: str, model: str, loss: str) -> None:
    """Of the mean or the sum in turn, so that each kind and each network has both."""
    turn = CASES.index((model, loss)) + [*DENSE].index(kind)
    reduction: Reduction = "mean" if turn % 2 else "sum"
    problem = build(model, loss)
    dense = DENSE[kind](problem, reduction).numpy()
    np.testing.assert_allclose(matrix_of(over_data(kind, problem, reduction)), dense, **CLOSE)


@pytest.mark.parametrize("kind", ["empirical-fisher", "covariance"])
def test_matrices_of_one_loss_equal_dense(kind: str, reduction: Reduction) -> None:
    problem = build("convolutional", "bce")
    outputs = problem.model(problem.inputs)
    loss = problem.loss_of(reduction)(outputs, problem.targets)
    operator = OPERATORS[kind](loss, outputs, problem.parameters, reduction)
    np.testing.assert_allclose(matrix_of(operator), DENSE[kind](problem, reduction), **CLOSE)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.slow
def test_jacobian_equals_dense(model: str) -> None:
    problem = build(model, "mse")
    dense = curvature_cases.dense_jacobian(problem).flatten(0, 1).numpy()
    outputs = problem.model(problem.inputs)
    for operator in (
        JacobianOperator(outputs, problem.parameters),
        JacobianOperator.over_data(problem.model, problem.batches),
    ):
        rows, columns = dense.shape
        assert operator.shape == dense.shape
        np.testing.assert_allclose(operator @ np.eye(columns), dense, **CLOSE)
        np.testing.assert_allclose(operator.T @ np.eye(rows), dense.T, **CLOSE)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_mean_of_many_draws_is_the_fisher_matrix(loss: str, reduction: Reduction) -> None:
    """Of these likelihoods, that is the generalised Gauss-Newton matrix."""
    problem = build("perceptron", loss)
    dense = curvature_cases.dense_ggn(problem, reduction).numpy()
    found = matrix_of(over_data("fisher", problem, reduction, draws=500))
    assert np.linalg.norm(found - dense) < 0.15 * np.linalg.norm(dense)
    few = matrix_of(over_data("fisher", problem, reduction, draws=2))
    assert np.linalg.norm(few - dense) > 0.15 * np.linalg.norm(dense)


def test_many_outputs_that_count_one_by_one_have_draws() -> None:
    """As of binary cross-entropies of an image's pixels, which are too many for a dense root."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(2, 300).double()
        batches = [(torch.randn(2, 2).double(), torch.rand(2, 300).double())]
    loss = nn.BCEWithLogitsLoss()
    fisher = FisherOperator.over_data(model, loss, batches, draws=400, parameters=["bias"])
    ggn = GGNOperator.over_data(model, loss, batches, parameters=["bias"])
    found, expected = (np.diag(matrix_of(each)) for each in (fisher, ggn))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_draws_depend_on_the_seed_alone() -> None:
    problem = build("perceptron", "cross-entropy")
    vector = np.ones(over_data("fisher", problem).shape[0])
    operator = over_data("fisher", problem, seed=1)
    torch.manual_seed(5)
    first = operator @ vector
    np.testing.assert_array_equal(operator @ vector, first)
    np.testing.assert_array_equal(over_data("fisher", problem, seed=1) @ vector, first)
    assert not np.allclose(over_data("fisher", problem, seed=2) @ vector, first)
    generator = over_data("fisher", problem, seed=np.random.default_rng(1))
    np.testing.assert_array_equal(generator @ vector, first)


@pytest.mark.parametrize("names", [["2"], ["0.weight"], ["2.bias", "0.weight"]])
def test_blocks_are_those_of_the_whole_matrix(names: list[str]) -> None:
    problem = build("perceptron", "cross-entropy")
    whole = over_data("hessian", problem)
    block = over_data("hessian", problem, parameters=names)
    rows = np.concatenate([np.r_[whole.slices[name]] for name in block.slices])
    assert all(any(each.startswith(name) for name in names) for each in block.slices)
    np.testing.assert_allclose(matrix_of(block), matrix_of(whole)[np.ix_(rows, rows)], **CLOSE)


# Contract ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPERATORS)
def test_the_model_is_left_as_it_was(kind: str) -> None:
    """Gradients, buffers, random numbers and the mode, though BatchNorm is in train mode."""
    problem = build("normalised", "cross-entropy")
    problem.model.train()
    for parameter in problem.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    buffers = {name: each.clone() for name, each in problem.model.named_buffers()}
    data = DataLoader(TensorDataset(problem.inputs, problem.targets), 4)
    state = torch.get_rng_state()
    operator = OPERATORS[kind].over_data(problem.model, problem.loss_of("mean"), data)
    _ = operator @ np.ones(operator.shape[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(each, buffers[name]) for name, each in problem.model.named_buffers())
    assert all(bool((p.grad == 1).all()) for p in problem.model.parameters())
    assert problem.model.training


class Counted(list[Any]):
    """Batches that count the passes through them."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()


METHODS: dict[str, tuple[Callable[[CurvatureOperator], Any], int]] = {
    "products": (lambda matrix: matrix @ np.ones((matrix.shape[0], 5)), 1),
    "hutchinson": (lambda matrix: hutchinson(matrix, 6), 1),
    "hutchinson_diagonal": (lambda matrix: hutchinson_diagonal(matrix, 6), 1),
    "frobenius_norm": (lambda matrix: frobenius_norm(matrix, 6), 1),
    "spectral_density": (lambda matrix: spectral_density(matrix, probes=4, steps=5), 5),
    # Three at first, and 16 one by one.
    "eigenpairs": (lambda matrix: eigenpairs(matrix, 2, tolerance=1e-12, max_products=19), 17),
}


def parts(found: Any) -> Mapping[str, object]:
    """What a method has found, by name."""
    if isinstance(found, Eigenpairs):
        return {name: getattr(found, name) for name in ("values", "vectors", "products")}
    return {"": found} if isinstance(found, np.ndarray) else vars(found)


def assert_same(one: Mapping[str, object], other: Mapping[str, object]) -> None:
    """Equal but for rounding, and for signs of eigenvectors.

    Matrix products of several vectors may add up in another order.
    """
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, (float, np.ndarray, torch.Tensor)):
            found, expected = np.asarray(value), np.asarray(other[name])
            if name == "vectors":
                found, expected = abs(found), abs(expected)
            scale = float(np.abs(expected).max(initial=1.0))  # residuals are rounding errors
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * scale)
        else:
            assert value == other[name]


@pytest.mark.parametrize("method", METHODS)
def test_several_products_take_one_pass(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result as one by one, where memory is short."""
    call, passes = METHODS[method]
    problem = build("convolutional", "cross-entropy")
    data = Counted(problem.batches)
    operator = HessianOperator.over_data(problem.model, problem.loss_of("mean"), data)
    data.passes = 0
    found = call(operator)
    assert data.passes == passes
    for vectors in (0, 3):
        monkeypatch.setattr(matrices, "JOINT_BYTES", vectors * VECTOR_BYTES * operator.shape[0])
        again = call(operator)
        assert_same(*map(parts, (again, found)))


def test_dictionaries_as_batches() -> None:
    problem = build("perceptron", "cross-entropy")
    data = [{"input": x, "labels": y} for x, y in problem.batches]
    operator = HessianOperator.over_data(
        problem.model,
        problem.loss_of("mean"),
        data,
        split=lambda batch: ({"input": batch["input"]}, batch["labels"]),
    )
    np.testing.assert_array_equal(matrix_of(operator), matrix_of(over_data("hessian", problem)))


@pytest.mark.slow
def test_compiled_models_run_uncompiled() -> None:
    problem = build("perceptron", "cross-entropy")
    compiled: Any = torch.compile(problem.model, backend="aot_eager")
    compiled(problem.inputs)
    loss = problem.loss_of("mean")
    operator = HessianOperator.over_data(compiled, loss, problem.batches)
    np.testing.assert_array_equal(matrix_of(operator), matrix_of(over_data("hessian", problem)))


# What is refused --------------------------------------------------------------------------------


def weighted_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 5.0, 1.0], dtype=outputs.dtype)
    return nn.functional.cross_entropy(outputs, targets, weight)


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def hessian(
    data: Any = None, loss: Any = None, model: nn.Module | None = None, **options: Any
) -> CurvatureOperator:
    problem = build("perceptron", "cross-entropy")
    return HessianOperator.over_data(
        problem.model if model is None else model,
        nn.CrossEntropyLoss() if loss is None else loss,
        problem.batches if data is None else data,
        **options,
    )


BATCHES = build("perceptron", "cross-entropy").batches
SAMPLES = TensorDataset(*(torch.cat(each) for each in zip(*BATCHES, strict=True)))

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no batches": ({"data": []}, "the data has no batches"),
    "empty batch": (
        {"data": [*BATCHES, (torch.empty(0, 4).double(), torch.empty(0).long())]},
        "batch 3 of the data has no samples: leave it out",
    ),
    "generator": ({"data": (each for each in BATCHES)}, r"list\(data\)"),
    "dataset": ({"data": SAMPLES}, r"has samples and no batches: pass DataLoader\(data"),
    "one batch": ({"data": BATCHES[0]}, r"batch 0 of the data is a tensor of shape \[3, 4\].*one"),
    "dict": ({"data": [{"x": 1}]}, r"a dict with the keys \['x'\].*pass split=lambda"),
    "shuffled": ({"data": DataLoader(SAMPLES, 4, shuffle=True)}, "shuffle=False"),
    "shuffled in one batch": ({"data": DataLoader(SAMPLES, 8, shuffle=True)}, "shuffle=False"),
    "sum passed as mean": ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "loss_reduction='sum'"),
    "mean passed as sum": ({"loss_reduction": "sum"}, "pass loss_reduction='mean'"),
    "weighted mean": ({"loss": weighted_mean}, "isn't the mean over its samples.*reduction='sum'"),
    "coupled samples": ({"loss": contrastive}, "couples the samples of a batch"),
    "one size of batch": (
        {"loss": lambda x, y: (x.square().sum(1) * torch.ones(3).double()).mean()},
        "can't be computed for a part of batch 0",
    ),
    "no reduction": ({"loss": nn.CrossEntropyLoss(reduction="none")}, "must return a scalar"),
    "reduction": ({"loss_reduction": "none"}, "loss_reduction='none' is unknown"),
    "other targets": (
        {"data": [(BATCHES[0][0], BATCHES[2][1])], "loss": lambda x, y: x.sum()},
        "outputs for 3 samples and targets for 4",
    ),
    "no axis": ({"loss": nn.MSELoss(), "model": nn.Sequential(
        nn.Linear(4, 1).double(), nn.Flatten(0), nn.Unflatten(0, (1, -1)))}, "targets for 3"),
    "dropout": (
        {"model": nn.Sequential(nn.Linear(4, 3), nn.Dropout()).double()}, r"model.eval\(\)"
    ),
    "unknown name": ({"parameters": ["2.weigth"]}, "did you mean 2.weight"),
    "module without parameters": ({"parameters": ["1"]}, "'1' has no parameters that require"),
    "one name": ({"parameters": "2"}, r"one string: pass a list, \['2'\]"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_name_the_culprit_and_the_remedy(mistake: str) -> None:
    arguments, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        hessian(**arguments)


def test_data_that_changes_later_is_found() -> None:
    batches = [(inputs.clone(), targets) for inputs, targets in BATCHES]
    operator = hessian(batches)
    batches[1][0][0, 0] += 1
    with pytest.raises(ValueError, match="batch 1 of the data isn't the same"):
        operator @ np.ones(operator.shape[0])
    with pytest.raises(ValueError, match="batch 1 of the data isn't the same"):
        eigenpairs(operator)
    del batches[1:]
    with pytest.raises(ValueError, match="batch 1 of the data isn't the same"):
        operator @ np.ones(operator.shape[0])


def test_what_has_no_matrix_is_refused() -> None:
    problem = build("perceptron", "cross-entropy")
    log_probabilities = nn.Sequential(problem.model, nn.LogSoftmax(1))
    vector = np.ones(sum(p.numel() for p in problem.model.parameters()))
    for kind in (GGNOperator, FisherOperator):
        operator = kind.over_data(log_probabilities, nn.NLLLoss(), problem.batches)
        with pytest.raises(UnavailableError, match="linear in what the model returned"):
            operator @ vector
    with pytest.raises(ValueError, match="0 draws"):
        over_data("fisher", problem, draws=0)
    outputs = problem.model(problem.inputs)
    with pytest.raises(UnavailableError, match="have no graph"):
        JacobianOperator(outputs.detach(), problem.parameters)


def test_outputs_may_be_several_tensors_of_which_the_jacobian_takes_one() -> None:
    inner = build("perceptron", "cross-entropy").model
    pair = Net(lambda net, x: (net.inner(x), x), inner=inner)

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs[0], targets)

    found = matrix_of(HessianOperator.over_data(pair, loss, BATCHES))
    np.testing.assert_array_equal(found, matrix_of(hessian()))
    found = matrix_of(GGNOperator.over_data(pair, loss, BATCHES))
    single = GGNOperator.over_data(pair.inner, nn.functional.cross_entropy, BATCHES)
    np.testing.assert_array_equal(found, matrix_of(single))
    with pytest.raises(ValueError, match=r"returned a tuple of 2.*one tensor"):
        JacobianOperator.over_data(pair, BATCHES)


@pytest.mark.parametrize("is_recurrent", [True, False], ids=["recurrent", "linear"])
@pytest.mark.parametrize("enabled", [True, False], ids=["cuDNN", "without"])
def test_recurrent_layers_are_not_cudnns(is_recurrent: bool, enabled: bool) -> None:
    """Those of cuDNN have no second derivative, and no first in eval mode."""
    layer = nn.LSTM(3, 2, batch_first=True) if is_recurrent else nn.Linear(3, 2)
    seen: list[bool] = []

    def compute(net: Any, x: Tensor) -> Tensor:
        seen.append(torch.backends.cudnn.enabled)
        found = net.layer(x)
        return (found[0] if is_recurrent else found)[:, -1]

    data = [(torch.randn(4, 5, 3), torch.randn(4, 2))]
    with torch.backends.cudnn.flags(enabled=enabled):
        hessian = HessianOperator.over_data(Net(compute, layer=layer).eval(), nn.MSELoss(), data)
        hessian @ torch.ones(hessian.shape[1])
        assert torch.backends.cudnn.enabled == enabled
    assert set(seen) == {enabled and not is_recurrent}
