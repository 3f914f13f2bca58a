"""Deviations from the mean gradient by every operator, against its factors in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens.numerics.deviations import ROUNDINGS
from gradlens.operators.composed import Grouped, Joined, Summed
from gradlens.operators.convolution import Convolution, Geometry
from gradlens.operators.dense import Dense, stored
from gradlens.operators.operator import GradientOperator
from gradlens.operators.outer_products import OuterProducts
from gradlens.operators.table_rows import IndexedRows

Factor = Callable[..., Tensor]
"""A factor of gradients of a shape, whose first axis is that of samples."""

GEOMETRY = Geometry((3, 3), (1, 1), (1, 1), 1)
INDICES = torch.tensor([0, 1, 1, 4]).repeat(8)
OWNERS = torch.arange(8).repeat_interleave(4)

OPERATORS: dict[str, Callable[[Factor, Factor], GradientOperator]] = {
    "dense": lambda delta, x: Dense(delta(8, 7, 11)),
    "outer product, by pairs": lambda delta, x: OuterProducts(delta(6, 1, 40), x(6, 1, 50), 6.0),
    "outer product, by elements": lambda delta, x: OuterProducts(
        delta(64, 1, 4), x(64, 1, 5), 64.0
    ),
    "sum, by pairs": lambda delta, x: OuterProducts(delta(3, 2, 40), x(3, 2, 50)),
    "sum, by elements": lambda delta, x: OuterProducts(delta(64, 9, 4), x(64, 9, 5)),
    "convolution": lambda delta, x: Convolution(delta(8, 6, 4, 4), x(8, 3, 6, 6), GEOMETRY),
    "stored": lambda delta, x: stored(OuterProducts(delta(9, 3, 4), x(9, 3, 5))),
    "rows": lambda delta, x: IndexedRows(INDICES, delta(32, 3), OWNERS, 8, 6),
    "summed": lambda delta, x: Summed(
        [OuterProducts(delta(8, 1, 4), x(8, 1, 5)), Dense(delta(8, 4, 5))]
    ),
    "grouped": lambda delta, x: Grouped(OuterProducts(delta(16, 1, 4), x(16, 1, 5)), 2),
    "joined, by pairs": lambda delta, x: Joined(
        [OuterProducts(delta(n, 1, 40), x(n, 1, 50)) for n in (3, 5)], [2.0, 2.0]
    ),
    "joined, by elements": lambda delta, x: Joined(
        [Dense(delta(n, 4, 5)) for n in (3, 5)], [2.0, 2.0]
    ),
}


def near_each_other(spread: float, dtype: torch.dtype, scale: float = 1.0) -> Factor:
    """Factors whose samples differ by ``spread``; the same ones at each call, but for ``scale``."""
    noise = torch.Generator().manual_seed(1)

    def factor(*shape: int) -> Tensor:
        of_shape = torch.Generator().manual_seed(sum(shape[1:]))
        centre = torch.randn(shape[1:], generator=of_shape)
        exact = centre + spread * torch.randn(shape, generator=noise)
        return (scale * exact.to(dtype)).to(dtype)

    return factor


def built(name: str, spread: float, dtype: torch.dtype, scale: float = 1.0) -> GradientOperator:
    return OPERATORS[name](near_each_other(spread, dtype, scale), near_each_other(spread, dtype))


def exact_rows(name: str, spread: float, dtype: torch.dtype) -> Tensor:
    """gₙ ``[N, D]`` of the same factors, computed in float64."""

    def in_double(factor: Factor) -> Factor:
        return lambda *shape: factor(*shape).double()

    factors = [in_double(near_each_other(spread, dtype)) for _ in range(2)]
    return OPERATORS[name](*factors).dense().flatten(1)


PRECISIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_deviations_are_within_their_bounds(name: str, dtype: torch.dtype) -> None:
    for spread in (1.0, 1e-2, 1e-4, 1e-6, 1e-8, 0.0):
        rows = exact_rows(name, spread, dtype)
        mean = rows.mean(0)
        apart = rows - mean
        operator = built(name, spread, dtype)
        found, gram = operator.deviations(), operator.centred_gram()
        elements = operator.element_deviations()
        total = apart.square().sum()
        assert found.squared_norms.dtype == found.dots.dtype == gram.dtype == torch.float64
        bound = found.noise + found.rounding + 1e-5 * total
        assert (found.squared_norms.sum() - total).abs() <= bound
        assert (found.squared_norms - apart.square().sum(1)).abs().max() <= bound
        of_factors = ROUNDINGS * 2.0**-52 * rows.square().sum()
        assert (gram - apart @ apart.T).abs().max() <= bound + of_factors
        along = apart @ mean
        assert (found.dots - along).square().sum() <= bound * found.squared_mean
        squares = apart.square().sum(0).reshape(operator.shape)
        by_element = len(rows) * elements.noise * elements.mean.double().square().sum()
        assert (elements.squares - squares).abs().sum() <= by_element + 1e-5 * total
        # The bounds are no excuse: samples that differ by a hundred roundings have right variances.
        if spread >= 100 * torch.finfo(dtype).eps and spread >= 1e-6:
            assert found.noise + found.rounding < total


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_deviations_from_the_mean_of_another_batch(name: str, dtype: torch.dtype) -> None:
    for spread in (1.0, 1e-2, 1e-4, 1e-8):
        rows, operator = exact_rows(name, spread, dtype), built(name, spread, dtype)
        centre = (rows.mean(0) * (1 + spread / 3)).to(operator.dtype)
        apart = rows - centre.double()
        found = operator.deviations_about(centre.reshape(operator.shape))
        exact = apart.square().sum(1)
        bound = found.noise + found.rounding + 1e-5 * exact.sum()
        assert (found.squared_norms - exact).abs().max() <= bound
        assert (found.dots - apart @ centre.double()).square().sum() <= bound * found.squared_mean


@pytest.mark.parametrize("name", OPERATORS)
def test_some_of_the_samples(name: str) -> None:
    operator = built(name, 1.0, torch.float64)
    for samples in ([1, 2, operator.batch_size - 1], [], [0]):
        kept = operator.some(torch.tensor(samples, dtype=torch.int64))
        assert (kept.batch_size, kept.shape) == (len(samples), operator.shape)
        torch.testing.assert_close(kept.dense(), operator.dense()[samples])
        torch.testing.assert_close(kept.squared_norms(), operator.squared_norms()[samples])
        assert kept.nbytes <= operator.nbytes * len(samples) / 2
    assert operator.dense().shape[0] == operator.batch_size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_results_scale_exactly(name: str, dtype: torch.dtype) -> None:
    """Squares of gradients of 2^-60 vanish in float32, and those of 2^70 overflow."""
    for spread, exponent in itertools.product((1.0, 1e-3), (-60, 60)):
        assert_scales(name, spread, dtype, exponent)


def assert_scales(name: str, spread: float, dtype: torch.dtype, exponent: int) -> None:
    usual, scaled = (built(name, spread, dtype, 2.0**each) for each in (0, exponent))
    factor = 4.0**exponent
    centre = usual.mean() / 2
    pairs = (
        (usual.deviations(), scaled.deviations()),
        (usual.deviations_about(centre), scaled.deviations_about(2.0**exponent * centre)),
    )
    for expected_deviations, found_deviations in pairs:
        for field in ("squared_norms", "dots", "squared_mean", "noise", "rounding"):
            expected_value = getattr(expected_deviations, field)
            assert_equal(getattr(found_deviations, field), factor * expected_value)
    assert_equal(scaled.centred_gram(), factor * usual.centred_gram())
    assert_equal(scaled.gram(), factor * usual.gram())
    assert_equal(scaled.squared_norms(), factor * usual.squared_norms())
    assert_equal(scaled.sum_of_squares(), factor * usual.sum_of_squares())
    found, expected = scaled.element_deviations(), usual.element_deviations()
    assert_equal(found.squares.double(), factor * expected.squares.double())
    assert_equal(found.mean, 2.0**exponent * expected.mean)
    direction = torch.ones(usual.shape, dtype=dtype)
    assert_equal(scaled.dot(2.0**exponent * direction), factor * usual.dot(direction))


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [3.0, 1e3, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_without_a_sample_are_right_or_unknown(size: float, dtype: torch.dtype) -> None:
    gradients = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients[2] *= size
    found = Dense(gradients).deviations().norms_without()
    rows = gradients.double().flatten(1)
    means = torch.stack([rows[torch.arange(8) != n].mean(0) for n in range(8)])
    expected = means.norm(dim=1) / rows.mean(0).norm()
    is_known = found.isfinite()
    torch.testing.assert_close(found[is_known], expected[is_known], rtol=0.05, atol=0)
    assert bool(is_known[torch.arange(8) != 2].all())
    assert bool(is_known[2]) == (size < 1e9)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_rounding_errors_are_those_of_the_precision_that_gradients_were_computed_in(
    dtype: torch.dtype,
) -> None:
    """Of weights, which the graph transposes, of biases, tables and normalisations alike."""
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 6), nn.Conv1d(3, 2, 3), nn.GroupNorm(1, 2)
    ).to(dtype)
    with gradlens.per_sample_gradients(model) as gradients:
        outputs = model(torch.arange(15).reshape(5, 3) % 5)
        (outputs.square().sum((1, 2)).mean()).backward()
    assert [*gradients] == [name for name, _ in model.named_parameters()]
    assert {each.eps for each in gradients.values()} == {torch.finfo(dtype).eps}
