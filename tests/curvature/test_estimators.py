"""The Frobenius norm, determinants and inverse products, against dense matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gradlens.curvature import GGNOperator, InverseOperator, frobenius_norm, log_determinant
from gradlens.curvature.operator import signs_like
from gradlens.numerics.unavailable import UnavailableError
from tests.cases.curvature_cases import build, dense_ggn

SIZE = 40


def symmetric(eigenvalues: NDArray[Any], seed: int = 0) -> NDArray[Any]:
    generator = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(generator.standard_normal((len(eigenvalues),) * 2))
    return vectors @ np.diag(eigenvalues) @ vectors.T


DECAYING = symmetric(0.7 ** np.arange(SIZE))
INDEFINITE = symmetric(np.linspace(-1.0, 2.0, SIZE))


def test_intervals_of_norms_hold_the_truth_about_as_often_as_they_state() -> None:
    truth = np.linalg.norm(INDEFINITE)
    estimates = [frobenius_norm(INDEFINITE, 10, seed) for seed in range(200)]
    intervals = [estimate.confidence_interval(0.9) for estimate in estimates]
    assert 165 <= sum(low <= truth <= high for low, high in intervals) <= 197
    values = [estimate.value for estimate in estimates]
    assert abs(np.mean(values) - truth) < 4 * np.std(values) / math.sqrt(200)


# Determinants -------------------------------------------------------------------------------

LOW_RANK = symmetric(np.maximum(np.arange(SIZE) - 30.0, 0))


def truth_of(matrix: NDArray[Any], damping: float) -> float:
    return float(np.linalg.slogdet(matrix + damping * np.eye(len(matrix)))[1])


@pytest.mark.parametrize("matrix", [DECAYING, LOW_RANK], ids=["decaying", "low rank"])
@pytest.mark.parametrize(("damping", "steps"), [(1.0, 3), (1e-3, 6)])
def test_intervals_of_determinants_hold_the_truth(
    matrix: NDArray[Any], damping: float, steps: int
) -> None:
    truth = truth_of(matrix, damping)
    found = [log_determinant(matrix, damping, 4, steps, seed=seed) for seed in range(40)]
    intervals = [each.confidence_interval() for each in found]
    assert sum(low <= truth <= high for low, high in intervals) >= 33  # one in a thousand fails
    ends = np.array([(each.lower.value, each.upper.value) for each in found])
    error = 4 * ends.std(0) / math.sqrt(40)
    assert ends[:, 0].mean() - error[0] <= truth <= ends[:, 1].mean() + error[1]


@pytest.mark.parametrize("steps", [1, 2, 4, 9, SIZE])
def test_bounds_of_a_single_probe_enclose_its_quadratic_form(steps: int) -> None:
    values, vectors = np.linalg.eigh(DECAYING)
    logarithm = (vectors * np.log(values + 0.01)) @ vectors.T
    generator = np.random.default_rng(3)
    signs = signs_like(torch.zeros(SIZE, dtype=torch.float64), generator).numpy()
    found = log_determinant(DECAYING, 0.01, 1, steps, seed=3)
    low, truth, high = found.lower.value, signs @ logarithm @ signs, found.upper.value
    if steps == SIZE:
        assert (low, high) == pytest.approx((truth, truth), rel=1e-9)
    else:
        assert low < truth < high


def test_determinants_that_cannot_be_had() -> None:
    assert "must be positive semidefinite" in log_determinant(INDEFINITE, 0.1).value.reason  # type: ignore[attr-defined]
    single = log_determinant(DECAYING.astype(np.float32).astype(np.float64), 1e-17)
    assert "within the rounding errors" in single.value.reason  # type: ignore[attr-defined]
    assert math.isnan(single.confidence_interval()[0])
    assert log_determinant(np.zeros((5, 5)), 0.5).value == pytest.approx(5 * math.log(0.5))


# Inverse products -------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.01, 1.0])
def test_inverse_products_solve_the_damped_system(damping: float) -> None:
    problem = build("perceptron", "cross-entropy")
    dense = dense_ggn(problem, "mean").numpy() + damping * np.eye(35)
    ggn = GGNOperator.over_data(problem.model, problem.loss_of("mean"), problem.batches)
    vector = np.random.default_rng(0).standard_normal(35)
    inverse = InverseOperator(ggn, damping, tolerance=1e-10)
    found = inverse.solve(vector)
    assert found.converged
    true = np.linalg.norm(dense @ found.vector - vector) / np.linalg.norm(vector)
    assert found.residual == pytest.approx(true, rel=1e-3, abs=1e-14)
    assert found.residual <= 1e-10
    np.testing.assert_allclose(found.vector, np.linalg.solve(dense, vector), rtol=1e-6)
    np.testing.assert_array_equal(inverse @ vector, found.vector)
    np.testing.assert_array_equal(inverse.T @ vector, found.vector)


def test_inverse_products_that_do_not_converge_say_why() -> None:
    vector = np.random.default_rng(0).standard_normal(SIZE)
    indefinite = InverseOperator(INDEFINITE, 0.1).solve(vector)
    assert not indefinite.converged
    assert "isn't positive definite" in indefinite.reason
    few = InverseOperator(DECAYING, 1e-9, max_products=5)
    assert not few.solve(vector).converged
    assert few.solve(vector).residual > 1e-6
    with pytest.raises(UnavailableError, match="after 6 products: raise max_products"):
        few @ vector
    single = InverseOperator(DECAYING.astype(np.float32), 1.0, tolerance=0.0)
    assert not single.solve(vector).converged
    assert not InverseOperator(DECAYING, 1.0).solve(np.zeros(SIZE)).vector.any()


def test_nan_has_a_reason() -> None:
    nan = np.full((4, 4), np.nan)
    assert "NaN or Inf" in InverseOperator(nan, 1.0).solve(np.ones(4)).reason
    assert (
        "the vector contains NaN"
        in InverseOperator(np.eye(4), 1.0).solve(np.full(4, np.inf)).reason
    )
