"""Traces, diagonals and densities: right on average, with error bars of the right size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import trapezoid
from scipy.sparse.linalg import LinearOperator

from gradlens.curvature import InverseOperator, frobenius_norm, log_determinant
from gradlens.curvature.eigenpairs import Eigenpairs, eigenpairs
from gradlens.curvature.estimate import (
    Estimate,
    RunningMean,
    SpectralDensity,
    hutchinson,
    hutchinson_blocks,
    hutchinson_diagonal,
    lanczos,
    spectral_density,
)
from gradlens.curvature.operator import Products
from gradlens.history.undefined import Undefined

SEEDS = 100


def gaussian_matrix(size: int = 60, seed: int = 0) -> np.ndarray:
    matrix = np.random.default_rng(seed).standard_normal((size, size))
    return (matrix + matrix.T) / 2


def decaying_matrix(size: int = 60, seed: int = 0) -> np.ndarray:
    """Few eigenvalues hold most of the trace, as in a network."""
    generator = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(generator.standard_normal((size, size)))
    return (basis * 50.0 / np.arange(1, size + 1) ** 1.5) @ basis.T


def rank_one_matrix(size: int = 60, seed: int = 0) -> np.ndarray:
    """Its samples are the most skewed."""
    vector = np.random.default_rng(seed).standard_normal(size)
    return np.outer(vector, vector)


MATRICES = {
    "gaussian": gaussian_matrix(),
    "decaying": decaying_matrix(),
    "rank one": rank_one_matrix(),
}


@pytest.fixture(params=MATRICES)
def matrix(request: pytest.FixtureRequest) -> np.ndarray:
    return MATRICES[request.param]


# Coverage


@pytest.mark.slow
def test_diagonal_errors_are_those_of_the_diagonal(matrix: np.ndarray) -> None:
    truth = np.diag(matrix)
    found = [hutchinson_diagonal(matrix, 30, seed) for seed in range(SEEDS)]
    scores = np.array([(e.diagonal - truth) / e.standard_error for e in found])
    covered = (np.abs(scores) < 2.045).mean()  # Student's t with 29 degrees of freedom
    assert 0.93 < covered < 0.97
    values = np.array([e.diagonal for e in found])
    assert (np.abs(values.mean(0) - truth) < 4.5 * values.std(0) / np.sqrt(SEEDS)).all()


def exact_density(found: SpectralDensity, eigenvalues: np.ndarray) -> np.ndarray:
    return stats.norm.pdf(found.grid[:, None], eigenvalues, found.width).mean(1)


# Values


def test_a_diagonal_matrix_has_no_error() -> None:
    diagonal = np.random.default_rng(0).standard_normal(30)
    matrix = np.diag(diagonal)
    found = hutchinson(matrix, 7)
    assert found.value == pytest.approx(diagonal.sum(), rel=1e-14)
    assert found.standard_error == 0.0
    assert found.confidence_interval() == (found.value, found.value)
    elements = hutchinson_diagonal(matrix, 7)
    np.testing.assert_array_equal(elements.diagonal, diagonal)
    assert not elements.standard_error.any()


def test_a_wider_level_is_a_wider_interval() -> None:
    found = hutchinson(gaussian_matrix(), 10)
    narrow, wide = found.confidence_interval(0.5), found.confidence_interval(0.99)
    assert wide[0] < narrow[0] < found.value < narrow[1] < wide[1]
    with pytest.raises(ValueError, match="probability"):
        found.confidence_interval(95)


def test_estimates_have_a_t_interval_and_those_of_positive_numbers_of_the_logarithm() -> None:
    found = Estimate(1.0, 0.5, 9, 10)
    half = 2.262157 * 0.5
    assert found.confidence_interval() == pytest.approx((1 - half, 1 + half))
    found = Estimate(3.0, 0.6, 9, 10, positive=True)
    factor = np.exp(2.262157 * 0.6 / 3)
    assert found.confidence_interval() == pytest.approx((3 / factor, 3 * factor))
    zero = Estimate(0.0, 0.0, 9, 10, positive=True)
    assert zero.confidence_interval() == (0, 0)


def test_the_error_of_a_trace_is_known_from_two_probes() -> None:
    """Of many eigenvalues, whose elements' variances are twice the sum of squares of a row."""
    matrix = gaussian_matrix(300)
    truth = np.sqrt(2 * (np.square(matrix).sum() - np.square(np.diag(matrix)).sum()) / 2)
    for seed in range(10):
        assert hutchinson(matrix, 2, seed).standard_error == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("samples", [2, 3, 50])
def test_running_means_equal_those_of_all_samples(samples: int) -> None:
    values = 1e3 + np.random.default_rng(0).exponential(size=(samples, 4))
    running = RunningMean()
    for value in torch.from_numpy(values):
        running.add(value)
    np.testing.assert_allclose(running.mean, values.mean(0), rtol=1e-14)
    np.testing.assert_allclose(running.standard_error(), stats.sem(values), rtol=1e-9)


# Density


@pytest.mark.parametrize("probes", [1, 5])
@pytest.mark.parametrize("steps", [1, 5, 30, 100])
def test_density_integrates_to_one(matrix: np.ndarray, probes: int, steps: int) -> None:
    found = spectral_density(matrix, probes, steps)
    assert trapezoid(found.density, found.grid) == pytest.approx(1, abs=1e-6)
    assert (found.density >= 0).all()


@pytest.mark.slow
def test_density_of_all_steps_is_exact_on_average() -> None:
    matrix = gaussian_matrix(4)
    found = spectral_density(matrix, 1500, 4, points=40)
    difference = np.abs(found.density - exact_density(found, np.linalg.eigvalsh(matrix)))
    assert (difference < 4 * found.standard_error + 1e-6).all()


@pytest.mark.slow
def test_the_quadrature_itself_adds_no_error_at_the_default_width() -> None:
    """Few steps from one vector against all steps from it."""
    matrix = gaussian_matrix(400)
    start = torch.from_numpy(np.random.default_rng(1).choice([-1.0, 1.0], 400))
    few, all_ = (next(lanczos(Products(matrix), [start], steps)) for steps in (20, 400))
    width = 1.5 / 20 * np.ptp(all_[0])
    grid = np.linspace(all_[0].min(), all_[0].max(), 50)
    rough, exact = (stats.norm.pdf(grid[:, None], nodes, width) @ w for nodes, w in (few, all_))
    assert np.abs(rough - exact).max() < 1e-5 * exact.max()


@pytest.mark.parametrize("spectrum", [[2.0], [3.0] * 20, [0.0] * 20, [1.0, -1.0] * 10])
def test_invariant_subspaces_end_lanczos(spectrum: list[float]) -> None:
    basis, _ = np.linalg.qr(gaussian_matrix(len(spectrum)))
    matrix = (basis * spectrum) @ basis.T
    products = Products((matrix + matrix.T) / 2)
    ((nodes, _),) = lanczos(products, [torch.from_numpy(basis.sum(1))], 15)
    assert len(nodes) == len(set(spectrum))
    density = spectral_density(matrix, 3, 15)
    assert trapezoid(density.density, density.grid) == pytest.approx(1, abs=1e-6)
    assert density.width > 0
    if len(set(spectrum)) == 1:
        expected = exact_density(density, np.array(spectrum))
        np.testing.assert_allclose(density.density, expected, atol=1e-9 * expected.max())
        assert (density.standard_error <= 1e-9 * expected.max()).all()


def test_a_stated_width_is_the_width() -> None:
    matrix = gaussian_matrix()
    found = spectral_density(matrix, 3, 60, relative_width=0.1)
    assert found.width == pytest.approx(0.1 * np.ptp(np.linalg.eigvalsh(matrix)))
    assert found.grid.shape == found.density.shape == found.standard_error.shape == (512,)
    low, high = found.confidence_band()
    assert (low >= 0).all()
    assert (low <= found.density).all()
    assert (found.density <= high).all()


# All estimators


ESTIMATORS: dict[str, Callable[..., Any]] = {
    "hutchinson": lambda matrix, seed=0: hutchinson(matrix, 4, seed),
    "blocks": lambda matrix, seed=0: hutchinson_blocks(matrix, {"a": slice(0, 1)}, 4, seed)["a"],
    "diagonal": lambda matrix, seed=0: hutchinson_diagonal(matrix, 4, seed),
    "density": lambda matrix, seed=0: spectral_density(matrix, 4, 10, seed=seed),
    "norm": lambda matrix, seed=0: frobenius_norm(matrix, 4, seed),
    "eigenpairs": lambda matrix, seed=0: eigenpairs(matrix, 2, seed=seed),
}


@pytest.fixture(params=ESTIMATORS)
def estimator(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return ESTIMATORS[request.param]


def numbers(estimate: Any) -> np.ndarray:
    """Value and standard error, or eigenvectors and residuals, in one array."""
    names = ("value", "diagonal", "density", "standard_error", "values", "vectors", "residuals")
    values = [getattr(estimate, name, ()) for name in names]
    return np.concatenate([np.ravel(v) for v in values])


def test_estimates_are_reproducible_and_leave_global_generators_alone(
    estimator: Callable[..., Any],
) -> None:
    matrix = gaussian_matrix()
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()
    first, second = estimator(matrix, seed=3), estimator(matrix, seed=3)
    np.testing.assert_array_equal(numbers(first), numbers(second))
    assert (numbers(first) != numbers(estimator(matrix, seed=4))).any()
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state[1])
    generator = np.random.default_rng(3)
    np.testing.assert_array_equal(numbers(first), numbers(estimator(matrix, seed=generator)))
    assert (numbers(first) != numbers(estimator(matrix, seed=generator))).any()


@pytest.mark.parametrize("size", [1, 40])
def test_a_zero_matrix(estimator: Callable[..., Any], size: int) -> None:
    found = estimator(np.zeros((size, size)))
    if isinstance(found, Eigenpairs):
        assert not found.values.any()
        assert found.converged
    elif isinstance(found, SpectralDensity):
        np.testing.assert_allclose(found.density, exact_density(found, np.zeros(1)))
        assert not found.standard_error.any()
    else:
        assert not numbers(found).any()


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_products_that_are_not_finite(
    estimator: Callable[..., Any], size: int, value: float
) -> None:
    operator = LinearOperator((size, size), matvec=lambda v: np.full(size, value), dtype=float)
    found = estimator(operator)
    if isinstance(found, Eigenpairs):
        assert np.isnan([found.values, found.residuals]).all()
        assert found.vectors.shape == (size, len(found.values))
        assert not found.converged
    else:
        assert np.isnan(numbers(found)).all()
    if isinstance(found, Estimate):
        assert isinstance(found.value, Undefined)
        assert "NaN or Inf" in found.value.reason
    else:
        assert "NaN or Inf" in found.reason


def test_one_sample_has_no_standard_error() -> None:
    found = hutchinson(gaussian_matrix(), 1)
    assert np.isfinite(found.value)
    assert isinstance(found.standard_error, Undefined)
    for end in found.confidence_interval():
        assert isinstance(end, Undefined)
        assert "two or more" in end.reason
    assert np.isnan(hutchinson_diagonal(gaussian_matrix(), 1).standard_error).all()


BAD: list[tuple[Callable[[np.ndarray], Any], str]] = [
    (lambda matrix: hutchinson(matrix, 0), "0 samples"),
    (lambda matrix: hutchinson_diagonal(matrix, 0), "0 samples"),
    (lambda matrix: frobenius_norm(matrix, 0), "samples: take"),
    (lambda matrix: spectral_density(matrix, 0), "0 probes"),
    (lambda matrix: spectral_density(matrix, relative_width=1e-3), "take 1013"),
    (lambda matrix: eigenpairs(matrix, 0), "k is 0"),
    (lambda matrix: eigenpairs(matrix, 1, "LA"), "which is 'LA'"),  # type: ignore[arg-type]
    (lambda matrix: eigenpairs(matrix, 1, start=np.ones(3)), "start has 3 rows"),
    (lambda matrix: eigenpairs(matrix, 5, max_products=5), "more than 5 products"),
    (lambda matrix: eigenpairs(matrix[:2]), "square"),
    (lambda matrix: log_determinant(matrix, 0.0), "damping=.*positive"),
    (lambda matrix: log_determinant(matrix, -1.0), "damping=.*positive"),
    (lambda matrix: log_determinant(matrix, np.inf), "damping=.*positive"),
    (lambda matrix: log_determinant(matrix, 1.0, 0), "probes of .* steps: take"),
    (lambda matrix: InverseOperator(matrix, -1), "damping=-1"),
    (lambda matrix: InverseOperator(matrix, 1.0).solve(np.zeros(3)), "the vector has shape"),
    (lambda matrix: InverseOperator(matrix, 0.01, rank=-1), "rank=-1"),
]


@pytest.mark.parametrize(("call", "reason"), BAD)
def test_bad_requests_are_named(call: Callable[[np.ndarray], Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call(np.eye(40))
