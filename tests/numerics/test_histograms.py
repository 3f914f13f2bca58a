"""Histograms of per-sample gradients count what comparing every element with the edges counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradlens.numerics.histograms import CHUNK, FEW, Counts, Range, bin_edges
from gradlens.operators.composed import Summed
from gradlens.operators.convolution import Convolution, Geometry
from gradlens.operators.dense import Dense, is_to_be_stored, stored
from gradlens.operators.operator import GradientOperator
from gradlens.operators.outer_products import OuterProducts
from gradlens.operators.table_rows import IndexedRows

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.25, -0.02, 0.04, 1e30, -1e30, 1e-30, 1e-40, -1e-40, 1e-45]
NOT_FINITE = [math.inf, -math.inf, math.nan]
RANGES = [
    (-2.0, 2.0),
    (0.0, 1.0),
    (-1.0, 0.0),
    (1.0, 2.0),
    (-2.0, -1.0),
    (-0.1, 0.3),
    (1e-16, 1.0),
    (1000.0, 1000.001),
    (-1e30, 1e30),
    (-1e308, 1e308),
    (-1e-40, 1e-40),
    (-1e-44, 2e-44),
    (-5e-324, 5e-324),
]


def histogram_1d(values: Tensor, bins: int, range_: Range) -> Counts:
    return Dense(values[None]).histogram_1d(bins, range_)


def histogram_2d(
    values: Tensor, companions: Tensor, bins: tuple[int, int], range_: tuple[Range, Range]
) -> Counts:
    return Dense(values).histogram_2d(companions, bins, range_)


def bin_of(values: np.ndarray, bins: int, range_: Range) -> np.ndarray:
    edges = bin_edges(bins, range_)
    return (np.searchsorted(edges, values, side="right") - 1).clip(0, bins - 1)


def assert_counts_1d(found: Counts, elements: Tensor, bins: int, range_: Range) -> None:
    values = elements.double().numpy().ravel()
    known = values[~np.isnan(values)]
    expected = np.bincount(bin_of(known, bins, range_), minlength=bins)
    np.testing.assert_array_equal(found.hist, expected)
    assert int(found.below) == (known < range_[0]).sum()
    assert int(found.above) == (known > range_[1]).sum()
    assert int(found.nan) == len(values) - len(known)


def assert_counts_2d(
    found: Counts,
    elements: Tensor,
    parameter: Tensor,
    bins: tuple[int, int],
    range_: tuple[Range, Range],
) -> None:
    x = elements.double().numpy().reshape(len(elements), -1)
    y = np.broadcast_to(parameter.double().numpy().ravel(), x.shape)
    known = ~(np.isnan(x) | np.isnan(y))
    expected = np.zeros(bins, dtype=int)
    np.add.at(
        expected, (bin_of(x[known], bins[0], range_[0]), bin_of(y[known], bins[1], range_[1])), 1
    )
    np.testing.assert_array_equal(found.hist, expected)
    axes = list(zip((x, y), range_, strict=True))
    assert found.below.tolist() == [(v < low).sum() for v, (low, _) in axes]
    assert found.above.tolist() == [(v > high).sum() for v, (_, high) in axes]
    assert int(found.nan) == (~known).sum()


@st.composite
def numbers(draw: st.DrawFn, *shape: int) -> Tensor:
    """Numbers of one or of many magnitudes, with zeros, ties at edges and special values."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    kind = draw(st.sampled_from(["normal", "rectified", "rounded", "wide", "special"]))
    if kind == "rectified":
        values = values.relu()
    elif kind == "rounded":
        values = (4 * values).round() / 4
    elif kind == "wide":
        values = values * 10 ** (4 * values)
    elif kind == "special":
        values = torch.tensor(SPECIAL)[values.mul(1e4).long() % len(SPECIAL)]
    for index in draw(st.lists(st.integers(0, values.numel() - 1), max_size=3)):
        values.view(-1)[index] = draw(st.sampled_from([*SPECIAL, *NOT_FINITE]))
    return values.to(draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])))


AXES = st.tuples(st.sampled_from([1, 2, 3, 40, 100, 300]), st.sampled_from(RANGES))


def by_signs(delta: Tensor, inputs: Tensor, scale: float = 1.0) -> OuterProducts:
    """Outer products whose small elements are counted by signs, however few there are."""
    operator = OuterProducts(delta, inputs, scale)
    operator.few = 0
    return operator


@pytest.mark.slow
@settings(max_examples=80)
@given(st.data(), AXES, AXES)
def test_outer_products(data: st.DataObject, x: tuple[int, Range], y: tuple[int, Range]) -> None:
    n, rows, columns = (data.draw(st.sampled_from(sizes)) for sizes in ([1, 7], [1, 5], [1, 30]))
    delta, inputs = data.draw(numbers(n, 1, rows)), data.draw(numbers(n, 1, columns))
    parameter = data.draw(numbers(rows, columns))
    scale = data.draw(st.sampled_from([1.0, 7.0, 128.0]))
    operator = OuterProducts(delta, inputs, scale)
    elements = operator.dense()
    for individual in (operator, by_signs(delta, inputs, scale), Dense(elements)):
        for max_bytes in (1, 200, 10**6):
            found = individual.histogram_1d(*x, max_bytes)
            assert_counts_1d(found, elements, *x)
            bins, range_ = (x[0], y[0]), (x[1], y[1])
            joint = individual.histogram_2d(parameter, bins, range_, max_bytes)
            assert_counts_2d(joint, elements, parameter, bins, range_)
    expected = elements.abs().amax()
    torch.testing.assert_close(operator.abs_max(), expected, rtol=0, atol=0, equal_nan=True)


def whole(*shape: int) -> Tensor:
    """Small whole numbers: sums of their products are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).float()


OPERATORS = {
    "outer product": OuterProducts(whole(5, 1, 6), whole(5, 1, 40)),
    "outer product, by signs": by_signs(whole(5, 1, 6), whole(5, 1, 40)),
    "backward from a negative multiple": OuterProducts(whole(5, 1, 6), whole(5, 1, 40), -2.0),
    "negative, by signs": by_signs(whole(5, 1, 6), whole(5, 1, 40), -2.0),
    "short sequence": OuterProducts(whole(5, 2, 6), whole(5, 2, 40)),
    "long sequence": OuterProducts(whole(5, 30, 6), whole(5, 30, 40)),
    "convolution": Convolution(
        whole(5, 4, 6, 6), whole(5, 3, 8, 8), Geometry((3, 3), (1, 1), (1, 1), 1)
    ),
    "stored": stored(
        Convolution(whole(5, 4, 6, 6), whole(5, 3, 8, 8), Geometry((3, 3), (1, 1), (1, 1), 1), 3.0)
    ),
    "embedding": IndexedRows(
        torch.tensor([0, 1, 1, 4, 0, 2]), whole(6, 8), torch.tensor([0, 0, 0, 1, 1, 1]), 2, 5
    ),
    "embedding, in no order": IndexedRows(
        torch.tensor([0, 1, 1, 4, 1, 2]), whole(6, 8), torch.tensor([3, 0, 1, 0, 0, 3]), 4, 5, 3.0
    ),
    "tied": Summed([OuterProducts(whole(5, 1, 6), whole(5, 1, 7)), Dense(whole(5, 6, 7))]),
    "vector": Dense(whole(5, 12)),
    "scalar": Dense(whole(5)),
    "nothing": Dense(whole(5, 0)),
    "no inputs": OuterProducts(whole(5, 1, 3), whole(5, 1, 0)),
}


@pytest.mark.parametrize("max_bytes", [1, 500, 10**7])
@pytest.mark.parametrize("range_", [(-2.0, 2.0), (-30.0, 50.0), (1.0, 7.0)])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_operators(operator: GradientOperator, range_: Range, max_bytes: int) -> None:
    elements, parameter = operator.dense(), whole(*operator.shape)
    assert_counts_1d(operator.histogram_1d(8, range_, max_bytes), elements, 8, range_)
    bins, ranges = (8, 3), (range_, (-1.0, 2.0))
    found = operator.histogram_2d(parameter, bins, ranges, max_bytes)
    assert_counts_2d(found, elements, parameter, bins, ranges)
    if elements.numel():
        assert operator.abs_max() == elements.abs().amax()


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_stored_gradients_are_the_same(operator: GradientOperator) -> None:
    assert torch.equal(stored(operator).dense(), operator.dense())
    assert not is_to_be_stored(operator, 0)
    assert is_to_be_stored(OPERATORS["convolution"], 10**7)
    assert not is_to_be_stored(OPERATORS["stored"], 10**7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("range_", RANGES)
def test_neighbours_of_edges(range_: Range, dtype: torch.dtype) -> None:
    edges = torch.from_numpy(bin_edges(10, range_)).to(dtype)
    infinity = torch.full_like(edges, math.inf)
    nearby = [torch.nextafter(edges, -infinity), edges, torch.nextafter(edges, infinity)]
    values = torch.cat(nearby)
    assert_counts_1d(histogram_1d(values, 10, range_), values, 10, range_)


def test_more_elements_than_are_binned_at_once() -> None:
    values = torch.randn(3, CHUNK, generator=torch.Generator().manual_seed(0)) * 0.1
    assert_counts_1d(histogram_1d(values, 100, (-2.0, 2.0)), values, 100, (-2.0, 2.0))
    bins, ranges = (40, 50), ((-1.0, 1.0), (-0.2, 0.1))
    found = histogram_2d(values, values[0], bins, ranges)
    assert_counts_2d(found, values, values[0], bins, ranges)


@pytest.mark.parametrize("extra", [[], [math.nan], [math.inf, -math.inf, -0.0, 1e-45]], ids=str)
@pytest.mark.parametrize("range_", [(-2.0, 2.0), (-0.1, 0.3), (1.0, 2.0)])
@pytest.mark.parametrize("size", [0.01, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_share_of_large_numbers(
    dtype: torch.dtype, size: float, range_: Range, extra: list[float]
) -> None:
    """Few are picked out, and many are binned with all others."""
    values = size * torch.randn(2 * FEW + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[: len(extra)] = torch.tensor(extra, dtype=dtype)
    edges = torch.from_numpy(bin_edges(20, range_)).to(dtype)
    values[-len(edges) :] = edges
    assert_counts_1d(histogram_1d(values, 20, range_), values, 20, range_)


def test_more_small_numbers_than_single_precision_can_count() -> None:
    values = torch.full((2**24 + 3,), -1e-6)
    assert histogram_1d(values, 4, (-2.0, 2.0)).hist.tolist() == [0, len(values), 0, 0]


@given(
    st.integers(1, 1000), st.floats(-1e308, 1e308, allow_subnormal=False), st.floats(1e-300, 1e308)
)
def test_edges(bins: int, low: float, width: float) -> None:
    high = min(low + width, 1e308)
    if not low < high:
        return
    edges = bin_edges(bins, (low, high))
    assert (edges[0], edges[-1]) == (low, high)
    assert (np.diff(edges) >= 0).all()
    size = max(-low, high)
    np.testing.assert_allclose(
        edges / size, np.linspace(low / size, high / size, bins + 1), atol=1e-14
    )


@pytest.mark.parametrize("half", [0.1, 0.3, 2.0, 1e-7, math.pi])
def test_symmetric_ranges_have_an_edge_at_zero(half: float) -> None:
    edges = bin_edges(100, (-half, half))
    assert edges[50] == 0
    np.testing.assert_array_equal(edges, -edges[::-1])
