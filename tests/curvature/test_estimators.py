"""XTrace, XDiag, the Frobenius norm and inverse products, against dense matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradlens.curvature import (
    DiagonalEstimate,
    Estimate,
    GGNOperator,
    InverseOperator,
    frobenius_norm,
    hutchinson,
    hutchinson_diagonal,
    xdiag,
    xtrace,
)
from gradlens.numerics.unavailable import UnavailableError
from tests.cases.data_cases import build, dense_ggn

SIZE = 40


def symmetric(eigenvalues: NDArray[Any], seed: int = 0) -> NDArray[Any]:
    generator = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(generator.standard_normal((len(eigenvalues),) * 2))
    return vectors @ np.diag(eigenvalues) @ vectors.T


DECAYING = symmetric(0.7 ** np.arange(SIZE))
INDEFINITE = symmetric(np.linspace(-1.0, 2.0, SIZE))
LOW_RANK = symmetric(np.r_[3.0, -2.0, 1.0, np.zeros(SIZE - 3)])


def by_definition(matrix: NDArray[Any], probes: NDArray[Any]) -> NDArray[Any]:
    """XTrace's estimate for each probe: Hutchinson's for what the others' products leave."""
    estimates = []
    for place, probe in enumerate(probes):
        basis, _ = np.linalg.qr(matrix @ np.delete(probes, place, axis=0).T)
        rest = np.eye(len(matrix)) - basis @ basis.T
        left = rest @ probe
        scale = (len(matrix) - len(probes) + 1) / (left @ left)
        exact = np.trace(basis.T @ matrix @ basis)
        estimates.append(exact + scale * left @ matrix @ left)
    return np.array(estimates)


@pytest.mark.parametrize("matrix", [DECAYING, INDEFINITE], ids=["decaying", "indefinite"])
def test_xtrace_is_the_mean_over_probes_that_are_left_out(matrix: NDArray[Any]) -> None:
    probes = np.random.default_rng(3).standard_normal((6, SIZE))
    expected = by_definition(matrix, probes)
    found = xtrace(matrix, 6, seed=3)
    assert found.value == pytest.approx(expected.mean(), rel=1e-9)
    assert found.standard_error == pytest.approx(expected.std(ddof=1) / math.sqrt(3), rel=1e-8)
    assert found.products == 12


def test_xdiag_is_the_mean_over_probes_that_are_left_out() -> None:
    generator = np.random.default_rng(3)
    signs = [2 * generator.integers(0, 2, SIZE, dtype=np.int8) - 1 for _ in range(6)]
    probes = np.array(signs, dtype=np.float64)
    estimates = []
    for place, probe in enumerate(probes):
        basis, _ = np.linalg.qr(DECAYING @ np.delete(probes, place, axis=0).T)
        rest = DECAYING - basis @ basis.T @ DECAYING
        estimates.append(np.diag(DECAYING - rest) + probe * (rest @ probe))
    found = xdiag(DECAYING, 6, seed=3)
    np.testing.assert_allclose(found.diagonal, np.mean(estimates, axis=0), rtol=1e-8)


@pytest.mark.parametrize("samples", [4, 7, 100])
def test_matrices_of_low_rank_are_exact(samples: int) -> None:
    trace, diagonal = xtrace(LOW_RANK, samples), xdiag(LOW_RANK, samples)
    assert trace.value == pytest.approx(2.0, rel=1e-9)
    assert trace.standard_error < 1e-9
    np.testing.assert_allclose(diagonal.diagonal, np.diag(LOW_RANK), atol=1e-9)


def test_as_many_probes_as_rows_and_zero_matrices() -> None:
    assert xtrace(INDEFINITE, SIZE).value == pytest.approx(np.trace(INDEFINITE), rel=1e-6)
    assert xtrace(np.zeros((5, 5)), 3).value == 0.0
    assert not xdiag(np.zeros((5, 5)), 3).diagonal.any()
    assert xtrace(np.full((1, 1), 2.5), 3).value == pytest.approx(2.5)
    assert frobenius_norm(np.zeros((5, 5)), 3).value == 0.0


TRACES: dict[str, Callable[[int], Estimate]] = {
    "xtrace": lambda seed: xtrace(DECAYING, 5, seed),
    "xtrace, indefinite": lambda seed: xtrace(INDEFINITE, 5, seed),
    "frobenius": lambda seed: frobenius_norm(INDEFINITE, 10, seed),
}
TRUTHS = {
    "xtrace": np.trace(DECAYING),
    "xtrace, indefinite": np.trace(INDEFINITE),
    "frobenius": np.linalg.norm(INDEFINITE),
}


@pytest.mark.parametrize("kind", TRACES)
def test_intervals_hold_the_truth_about_as_often_as_they_state(kind: str) -> None:
    held = 0
    values = []
    for seed in range(200):
        estimate = TRACES[kind](seed)
        low, high = estimate.confidence_interval(0.9)
        held += low <= TRUTHS[kind] <= high
        values.append(estimate.value)
    assert 165 <= held <= 197
    spread = np.std(values) / math.sqrt(200)
    assert abs(np.mean(values) - TRUTHS[kind]) < 4 * spread


def _errors(estimate: Callable[[int], float], truth: float) -> float:
    return float(np.sqrt(np.mean([(estimate(seed) - truth) ** 2 for seed in range(50)])))


def test_xtrace_is_better_where_eigenvalues_decay() -> None:
    truth = np.trace(DECAYING)
    x = _errors(lambda seed: xtrace(DECAYING, 9, seed).value, truth)
    plain = _errors(lambda seed: hutchinson(DECAYING, 18, seed).value, truth)
    assert x < 0.5 * plain


def test_xdiag_is_better_than_hutchinson_where_eigenvalues_decay() -> None:
    def error(estimate: DiagonalEstimate) -> float:
        return float(np.linalg.norm(estimate.diagonal - np.diag(DECAYING)))

    x = [error(xdiag(DECAYING, 9, seed)) for seed in range(20)]
    plain = [error(hutchinson_diagonal(DECAYING, 18, seed)) for seed in range(20)]
    assert np.mean(x) < 0.5 * np.mean(plain)


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
    for estimate in (xtrace(nan, 3), frobenius_norm(nan, 3)):
        assert "NaN or Inf" in str(estimate.value.reason)  # type: ignore[attr-defined]
    assert "NaN or Inf" in xdiag(nan, 3).reason
    assert "NaN or Inf" in InverseOperator(nan, 1.0).solve(np.ones(4)).reason
    assert (
        "the vector contains NaN"
        in InverseOperator(np.eye(4), 1.0).solve(np.full(4, np.inf)).reason
    )


@pytest.mark.parametrize("method", [xtrace, xdiag, frobenius_norm])
def test_too_few_samples(method: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="samples: take"):
        method(DECAYING, 0)
