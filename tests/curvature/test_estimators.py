"""The Frobenius norm and inverse products, against dense matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradlens.curvature import GGNOperator, InverseOperator, frobenius_norm
from gradlens.numerics.unavailable import UnavailableError
from tests.cases.data_cases import build, dense_ggn

SIZE = 40


def symmetric(eigenvalues: NDArray[Any], seed: int = 0) -> NDArray[Any]:
    generator = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(generator.standard_normal((len(eigenvalues),) * 2))
    return vectors @ np.diag(eigenvalues) @ vectors.T


DECAYING = symmetric(0.7 ** np.arange(SIZE))
INDEFINITE = symmetric(np.linspace(-1.0, 2.0, SIZE))


def test_norms_of_zero_matrices() -> None:
    assert frobenius_norm(np.zeros((5, 5)), 3).value == 0.0


def test_intervals_of_norms_hold_the_truth_about_as_often_as_they_state() -> None:
    truth = np.linalg.norm(INDEFINITE)
    estimates = [frobenius_norm(INDEFINITE, 10, seed) for seed in range(200)]
    intervals = [estimate.confidence_interval(0.9) for estimate in estimates]
    assert 165 <= sum(low <= truth <= high for low, high in intervals) <= 197
    values = [estimate.value for estimate in estimates]
    assert abs(np.mean(values) - truth) < 4 * np.std(values) / math.sqrt(200)


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
    with pytest.raises(ValueError, match="damping=-1"):
        InverseOperator(DECAYING, -1)
    with pytest.raises(ValueError, match="the vector has shape"):
        InverseOperator(DECAYING, 1.0).solve(np.zeros(3))


def test_nan_has_a_reason() -> None:
    nan = np.full((4, 4), np.nan)
    assert "NaN or Inf" in str(frobenius_norm(nan, 3).value.reason)  # type: ignore[attr-defined]
    assert "NaN or Inf" in InverseOperator(nan, 1.0).solve(np.ones(4)).reason
    assert (
        "the vector contains NaN"
        in InverseOperator(np.eye(4), 1.0).solve(np.full(4, np.inf)).reason
    )


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="samples: take"):
        frobenius_norm(DECAYING, 0)
