"""Curvature operators and eigenvalues equal those of dense matrices."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import diags
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from gradlens.curvature.eigenpairs import Eigenpairs, eigenpairs
from gradlens.curvature.hessian import GGNOperator, HessianOperator
from gradlens.curvature.operator import CurvatureOperator
from gradlens.numerics.unavailable import UnavailableError
from tests.cases.curvature_cases import (
    OF_ONE_BATCH,
    Problem,
    Reduction,
    SquareOnce,
    build,
    dense_ggn,
    dense_hessian,
)

with warnings.catch_warnings():
    # It compiles with torch.jit, as does the forward mode that it uses.
    warnings.simplefilter("ignore", DeprecationWarning)
    import curvlinops
    import torch._decomp.decompositions_for_jvp


def operator_of(
    kind: str, loss: Tensor, outputs: Tensor, parameters: dict[str, nn.Parameter], scale: float = 1
) -> CurvatureOperator:
    if kind == "hessian":
        return HessianOperator(loss, parameters, scale)
    return GGNOperator(loss, outputs, parameters, scale)


def operator_of_problem(kind: str, problem: Problem, scale: float = 1) -> CurvatureOperator:
    return operator_of(kind, *problem.forward(), problem.parameters, scale)


DENSE = {"hessian": dense_hessian, "ggn": dense_ggn}
ORACLES = {"hessian": curvlinops.HessianLinearOperator, "ggn": curvlinops.GGNLinearOperator}


@pytest.fixture(params=OF_ONE_BATCH)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["mse", "cross-entropy"])
def loss(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["mean", "sum"])
def reduction(request: pytest.FixtureRequest) -> Reduction:
    return request.param


@pytest.fixture(params=DENSE)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_products_equal_dense_ones_and_those_of_curvlinops(
    kind: str, model: str, loss: str, reduction: Reduction
) -> None:
    problem = build(model, loss, reduction)
    dense = DENSE[kind](problem).numpy()
    operator = operator_of_problem(kind, problem)
    found = operator @ np.eye(len(dense))
    assert operator.shape == dense.shape
    assert operator.dtype == np.float64
    np.testing.assert_allclose(found, dense, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found, found.T, rtol=1e-10, atol=1e-12)
    vector = np.random.default_rng(0).standard_normal(len(dense))
    np.testing.assert_allclose(operator @ vector, dense @ vector, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(operator.T @ vector, dense @ vector, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(operator.H @ vector, dense @ vector, rtol=1e-10, atol=1e-12)
    if model != "unused":  # curvlinops refuses parameters that the loss doesn't depend on
        data = [(problem.inputs, problem.targets)]
        parameters = list(problem.parameters.values())
        oracle = ORACLES[kind](problem.model, problem.criterion, parameters, data)
        expected = (oracle @ torch.from_numpy(vector)).numpy()
        np.testing.assert_allclose(operator @ vector, expected, rtol=1e-9, atol=1e-11)


def test_torch_products_equal_scipy_products(kind: str) -> None:
    problem = build("perceptron", "mse")
    operator = operator_of_problem(kind, problem)
    parts = [torch.randn_like(p) for p in problem.parameters.values()]
    flat = torch.cat([part.flatten() for part in parts])
    expected = operator @ flat.numpy()
    product = operator.product(parts)
    assert [part.shape for part in product] == [p.shape for p in problem.parameters.values()]
    assert not any(part.requires_grad for part in product)
    np.testing.assert_array_equal(torch.cat([part.flatten() for part in product]), expected)
    np.testing.assert_array_equal(operator.multiply(flat), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_come_out_in_float32(kind: str, dtype: torch.dtype) -> None:
    problem = build("perceptron", "mse")
    expected = operator_of_problem(kind, problem) @ np.ones(_size(problem))
    data = [(problem.inputs.to(dtype), problem.targets.to(dtype))]
    low = Problem(copy.deepcopy(problem.model).to(dtype), data, problem.loss_of)
    operator = operator_of_problem(kind, low)
    found = operator @ np.ones(_size(problem))
    assert operator.dtype == found.dtype == np.float32
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 20 * torch.finfo(dtype).eps


def _size(problem: Problem) -> int:
    return sum(p.numel() for p in problem.parameters.values())


def test_complex_numbers_behind_an_odd_number_of_others() -> None:
    """A complex number doesn't begin at each place of a vector."""
    torch.manual_seed(0)
    factor, pairs = torch.randn((), dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    parameters = {"factor": nn.Parameter(factor), "pairs": nn.Parameter(pairs)}

    def loss_of(factor: Tensor, pairs: Tensor) -> Tensor:
        turned = torch.view_as_complex(pairs) * (1 + 1j)
        return torch.view_as_real(turned).sin().sum() * factor

    found = HessianOperator(loss_of(*parameters.values()), parameters) @ np.eye(9)
    blocks = torch.autograd.functional.hessian(loss_of, (factor, pairs))
    sizes = zip((1, 8), blocks, strict=True)
    rows = [torch.cat([block.reshape(size, -1) for block in row], 1) for size, row in sizes]
    np.testing.assert_allclose(found, torch.cat(rows), atol=1e-12)


def test_a_linear_loss_has_no_curvature() -> None:
    weight = nn.Parameter(torch.randn(3))
    operator = HessianOperator((2 * weight).sum(), {"weight": weight})
    assert not (operator @ np.ones(3)).any()
    found = eigenpairs(operator, 10)
    assert len(found.values) == 3
    found = eigenpairs(operator)
    assert found.values.tolist() == found.residuals.tolist() == [0.0]
    assert found.converged


# Side effects


def test_nothing_is_left_behind(kind: str) -> None:
    problem = build("perceptron", "cross-entropy")
    problem.model.insert(1, nn.Dropout(0.5))
    problem.model.insert(2, nn.BatchNorm1d(4).double())
    parameters = problem.parameters
    calls: list[str] = []
    loss, outputs = problem.forward()
    loss.backward(retain_graph=True)
    handles = [
        p.register_hook(lambda g: calls.append("hook") or 0 * g) for p in parameters.values()
    ]
    gradients = {name: p.grad.clone() for name, p in parameters.items()}
    state = copy.deepcopy(problem.model.state_dict())
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()

    operator = operator_of(kind, loss, outputs, parameters)
    found = eigenpairs(operator, 2)

    assert found.values[0] > 0, "a user's hook has changed the curvature"
    assert calls == []
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state[1])
    assert all(torch.equal(p.grad, gradients[name]) for name, p in parameters.items())
    assert all(p.grad.grad_fn is None for p in parameters.values())
    assert all(torch.equal(state[name], now) for name, now in problem.model.state_dict().items())
    assert problem.model.training
    problem.forward()[0].backward()
    assert len(calls) == len(parameters), "the hooks are back"
    for handle in handles:
        handle.remove()
    assert not any(p._backward_hooks for p in parameters.values())


def test_the_users_backward_still_works_afterwards(kind: str) -> None:
    problem = build("tied", "mse")
    loss, outputs = problem.forward()
    operator = operator_of(kind, loss, outputs, problem.parameters)
    eigenpairs(operator)
    loss.backward()
    found = {name: p.grad.clone() for name, p in problem.parameters.items()}
    problem.model.zero_grad()
    problem.forward()[0].backward()
    assert all(torch.equal(p.grad, found[name]) for name, p in problem.parameters.items())


def test_no_reference_cycle_keeps_the_graph(kind: str) -> None:
    problem = build("perceptron", "mse")
    gc.collect()
    gc.disable()
    try:
        loss, outputs = problem.forward()
        operator = operator_of(kind, loss, outputs, problem.parameters)
        eigenpairs(operator)
        left = [weakref.ref(operator), weakref.ref(loss), weakref.ref(outputs)]
        del operator, loss, outputs
        assert [reference() for reference in left] == [None] * 3
    finally:
        gc.enable()


# What can't be differentiated twice


def test_fused_attention_in_a_checkpoint_is_no_hindrance(kind: str) -> None:
    torch.manual_seed(0)
    weight, inputs = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 5, 4)

    def attend(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x @ weight, x, x)

    def product(outputs: Tensor) -> np.ndarray:
        loss = outputs.square().mean()
        return operator_of(kind, loss, outputs, {"weight": weight}) @ np.ones(16)

    found = product(checkpoint(attend, inputs, use_reentrant=False))
    with sdpa_kernel(SDPBackend.MATH):
        expected = product(attend(inputs))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_an_operation_without_second_derivative_is_named_with_a_remedy(kind: str) -> None:
    points = nn.Parameter(torch.randn(3, 2))
    outputs = SquareOnce.apply(points.cos())
    with pytest.raises(UnavailableError, match=r"(?s)once_differentiable.*that torch can"):
        operator_of(kind, outputs.square().sum(), outputs, {"points": points}) @ np.ones(6)


NESTED: dict[str, Callable[[Tensor], Tensor]] = {
    "padded": lambda rows: torch.nested.to_padded_tensor(rows, 0.0),
    "apart": lambda rows: torch.stack([each.sum(0) for each in rows.unbind()]),
}


@pytest.mark.parametrize("way", NESTED)
def test_a_nested_tensor_is_refused_with_a_remedy(kind: str, way: str) -> None:
    weight = nn.Parameter(torch.randn(2, 2))
    nested = torch.nested.nested_tensor([torch.randn(n, 2) for n in (1, 3)], layout=torch.jagged)
    outputs = NESTED[way]((nested @ weight).relu())
    with pytest.raises(UnavailableError, match=r"(?s)twice; torch says.*that torch can"):
        operator_of(kind, outputs.square().sum(), outputs, {"weight": weight}) @ np.ones(4)


def test_other_errors_of_torch_are_not_reinterpreted() -> None:
    problem = build("perceptron", "mse")
    loss, _ = problem.forward()
    with torch.no_grad():
        for parameter in problem.parameters.values():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation") as caught:
        HessianOperator(loss, problem.parameters)
    assert not isinstance(caught.value, UnavailableError)


PERCEPTRON = build("perceptron", "mse")
BAD: dict[str, tuple[Callable[[Tensor, Tensor, Any], object], type[Exception], str]] = {
    "no parameters": (lambda loss, z, p: HessianOperator(loss, {}), ValueError, "no parameters"),
    "no names": (
        lambda loss, z, p: HessianOperator(loss, p.values()),
        ValueError,
        "no parameters by name",
    ),
    "no scalar": (lambda loss, z, p: HessianOperator(z, p), ValueError, "scalar"),
    "no graph": (lambda loss, z, p: HessianOperator(loss.detach(), p), ValueError, "no graph"),
    "frozen": (
        lambda loss, z, p: HessianOperator(loss, {**p, "frozen": torch.zeros(2)}),
        ValueError,
        "frozen",
    ),
    "other outputs": (
        lambda loss, z, p: GGNOperator(loss, PERCEPTRON.forward()[1], p),
        UnavailableError,
        "doesn't depend on the outputs",
    ),
    "outputs without a graph": (
        lambda loss, z, p: GGNOperator(loss, z.detach(), p),
        UnavailableError,
        "outputs have no graph",
    ),
    "other shapes": (
        lambda loss, z, p: HessianOperator(loss, p).product([torch.zeros(1)]),
        ValueError,
        "shapes",
    ),
    "a graph that is freed": (
        lambda loss, z, p: HessianOperator(loss, p),
        UnavailableError,
        "backward has run already",
    ),
    "other parameters": (
        lambda loss, z, p: HessianOperator(loss, {"other": nn.Parameter(torch.ones(2))}),
        UnavailableError,
        "none of the tracked parameters",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    call, kind, reason = BAD[name]
    loss, outputs = PERCEPTRON.forward()
    if name == "a graph that is freed":
        loss.backward()
    with pytest.raises(kind, match=reason):
        call(loss, outputs, PERCEPTRON.parameters)


# Eigenvalues


def spectra() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    bulk = generator.standard_normal(300)
    return {
        "1, 2, -5": np.array([1.0, 2.0, -5.0]),
        "3, -3": np.array([3.0, -3.0]),
        "one": np.array([-2.0]),
        "outliers": np.concatenate([[50, 30, 20, 15, -10], bulk]),
        "linear": np.linspace(-1, 2, 100),
        "multiple": np.repeat([4.0, 3.0, -1.0, -4.0], [1, 3, 80, 3]),
        "multiple and bulk": np.concatenate([np.full(3, 5.0), bulk, np.full(3, -7.0)]),
        "identity": np.full(50, 2.5),
        "zero": np.zeros(60),
        "tiny": 1e-30 * np.linspace(-1, 1, 40),
        "low rank": np.concatenate([[9.0, 4.0], np.zeros(70)]),
    }


def rotated(spectrum: np.ndarray, seed: int = 0) -> np.ndarray:
    size = len(spectrum)
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))
    matrix = (basis * spectrum) @ basis.T
    return (matrix + matrix.T) / 2


def expected_values(spectrum: np.ndarray, k: int, which: str) -> np.ndarray:
    outwardness = {"largest": spectrum, "smallest": -spectrum, "magnitude": np.abs(spectrum)}
    return spectrum[np.argsort(-outwardness[which], kind="stable")][:k]


KS = [(k, which, False) for k in (1, 2, 5) for which in ("largest", "smallest", "magnitude")]


@pytest.mark.parametrize(("k", "which", "is_small"), [*KS, (2, "largest", True)])
@pytest.mark.parametrize("spectrum", spectra().values(), ids=spectra())
def test_eigenpairs_equal_the_spectrum(
    spectrum: np.ndarray, k: int, which: str, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small subspaces, too."""
    if is_small:
        monkeypatch.setattr(sys.modules[eigenpairs.__module__], "SUBSPACE_BYTES", 0)
    matrix = rotated(spectrum)
    found = eigenpairs(matrix, k, which, max_products=2000)
    size, unsigned = np.abs(spectrum).max(), np.abs if which == "magnitude" else np.positive
    expected = unsigned(expected_values(spectrum, k, which))
    assert found.converged, found.reason
    np.testing.assert_allclose(unsigned(found.values), expected, rtol=1e-5, atol=1e-13 * size)
    assert_consistent(found, matrix)


def assert_consistent(found: Eigenpairs, matrix: np.ndarray) -> None:
    k = len(found.values)
    residuals = np.linalg.norm(matrix @ found.vectors - found.vectors * found.values, axis=0)
    size = np.abs(matrix).max()
    np.testing.assert_allclose(found.residuals, residuals, rtol=1e-3, atol=1e-12 * size)
    np.testing.assert_allclose(found.vectors.T @ found.vectors, np.eye(k), atol=1e-9)


def test_float32_networks_converge(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3))
    inputs, targets = 3 * torch.randn(32, 10), torch.randint(3, (32,))
    problem = Problem(
        model, [(inputs, targets)], lambda reduction: nn.CrossEntropyLoss(reduction=reduction)
    )
    found = eigenpairs(operator_of_problem(kind, problem), 2)
    in_double = [(inputs.double(), targets)]
    double = Problem(copy.deepcopy(model).double(), in_double, problem.loss_of)
    spectrum = np.linalg.eigvalsh(DENSE[kind](double).numpy())[::-1]
    assert found.converged, found.reason
    np.testing.assert_allclose(found.values, spectrum[:2], rtol=1e-5)


def test_a_good_start_saves_products_and_hides_nothing() -> None:
    spectrum = spectra()["linear"]
    matrix = rotated(spectrum)
    cold = eigenpairs(matrix, 2)
    warm = eigenpairs(matrix, 2, start=cold.vectors)
    assert warm.converged
    assert warm.products < 0.8 * cold.products
    np.testing.assert_allclose(warm.values, cold.values, rtol=1e-8)
    elsewhere = np.eye(400)[:, [7]]
    hiding = diags(np.concatenate([[200.0], np.random.default_rng(0).random(398), [100.0]]))
    found = eigenpairs(hiding, 1, start=np.eye(399 + 1)[:, [399]])
    assert found.converged
    np.testing.assert_allclose(found.values, [200.0])
    assert eigenpairs(hiding, 1, start=elsewhere).values == pytest.approx([200.0])


@pytest.mark.parametrize(
    "start", [np.zeros((100, 2)), np.full((100, 2), np.nan), np.ones((100, 3))]
)
def test_a_useless_start_is_survived(start: np.ndarray) -> None:
    matrix = rotated(spectra()["linear"])
    found = eigenpairs(matrix, 2, start=start)
    assert found.converged
    np.testing.assert_allclose(found.values, [2.0, 2 - 3 / 99], rtol=1e-5)


def test_a_large_matrix_in_float32_is_as_accurate_as_a_small_one() -> None:
    """A plain sum over as many elements would be off by more than the tolerance."""
    weight = nn.Parameter(torch.zeros(400_000))
    scale = torch.ones(400_000).index_fill(0, torch.arange(3), 3.0)
    loss = (scale * weight.square()).sum() / 2 + (weight.sum() / 400).square() / 2
    found = eigenpairs(HessianOperator(loss, {"weight": weight}), 1, tolerance=1e-6)
    assert found.converged, found.reason
    # 1 + 2.5 along the vector of ones, and 3, coupled a little.
    matrix = np.diag([3.0, 1.0]) + 2.5 * np.outer(root := np.sqrt([3, 4e5 - 3]), root) / 4e5
    np.testing.assert_allclose(found.values, np.linalg.eigvalsh(matrix)[-1:], rtol=2e-7)


def test_running_out_of_products_is_said() -> None:
    matrix = rotated(spectra()["linear"])
    found = eigenpairs(matrix, 3, max_products=12)
    assert not found.converged
    assert found.products == 12
    assert "12 products" in found.reason
    assert_consistent(found, matrix)
    spectrum = spectra()["linear"]
    for value, residual in zip(found.values, found.residuals, strict=True):
        assert np.abs(spectrum - value).min() <= residual
