"""Norms of elements whose squares leave the range of their precision."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

import gradlens
from gradlens import quantities
from gradlens.numerics.norms import norm, row_norms, scale_of
from gradlens.operators.dense import Dense
from tests.cases.simulated_device import SimulatedDevice
from tests.cases.steps import tracked_backward

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e-37, 1e-41, 1e25])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_norms_are_those_of_double_precision(scale: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = (torch.randn(5, 1000).double() * scale).to(dtype)
    matrix[2] = 0
    exact = torch.linalg.vector_norm(matrix.double(), dim=1)
    accuracy = 1e-6 if scale > 1e-40 else 1e-3
    torch.testing.assert_close(row_norms(matrix).double(), exact, rtol=accuracy, atol=0)
    whole = torch.linalg.vector_norm(exact)
    torch.testing.assert_close(norm(matrix).double(), whole, rtol=accuracy, atol=0)
    torch.testing.assert_close(norm(matrix.to_sparse()).double(), whole, rtol=accuracy, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 3])
def test_millions_of_elements(samples: int) -> None:
    """Added up one after the other in single precision, they would leave four digits."""
    torch.manual_seed(0)
    for elements in (torch.full((samples, 6_000_000), 0.1), torch.rand(samples, 6_000_000)):
        exact = torch.linalg.vector_norm(elements.double(), dim=1)
        torch.testing.assert_close(row_norms(elements).double(), exact, rtol=2e-7, atol=0)
        whole = torch.linalg.vector_norm(exact)
        torch.testing.assert_close(norm(elements).double(), whole, rtol=2e-7, atol=0)
        individual = Dense(elements)
        found = individual.squared_norms().double()
        torch.testing.assert_close(found, exact.square(), rtol=4e-7, atol=0)
    products = elements.double() @ elements.double().T  # of random elements
    dots = individual.dot(elements[0]).double()
    torch.testing.assert_close(dots, products[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(individual.gram().double(), products, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_odd_tensors(dtype: torch.dtype) -> None:
    precision = torch.promote_types(dtype, torch.float32)
    rows = torch.tensor([[math.inf, 1], [math.nan, 1], [0, 0], [3, 4], [-math.inf, math.inf]])
    found = row_norms(rows.to(dtype))
    assert found.dtype == norm(rows.to(dtype)).dtype == precision
    expected = torch.tensor([math.inf, math.nan, 0, 5, math.inf], dtype=precision)
    torch.testing.assert_close(found, expected, equal_nan=True)
    for shape in ((0, 3), (3, 0)):
        assert row_norms(torch.zeros(shape, dtype=dtype)).tolist() == [0] * shape[0]
        assert norm(torch.zeros(shape, dtype=dtype)) == 0
    assert norm(torch.tensor(-3.0, dtype=dtype)) == 3


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_norms_of_complex_numbers(scale: float) -> None:
    numbers = scale * torch.tensor([3 + 4j, 12j])
    assert float(norm(numbers.conj())) == pytest.approx(13 * scale, rel=1e-6, abs=0)


def test_vanishing_gradients_have_sizes_and_directions() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    tracked = [
        quantities.OutputGradientGeometry(),
        quantities.OutputGradientGeometry(correlation=False, name="without"),
        quantities.GradientGeometry(),
        quantities.GradNorm(),
    ]
    cockpit = gradlens.Cockpit(model, tracked)
    for step in range(2):
        loss = model(torch.ones(5, 4)).sum() * 1e-25
        model.zero_grad()
        tracked_backward(cockpit, step, loss)
    history = cockpit.history
    expected = pytest.approx(1e-25 * math.sqrt(15), rel=1e-5, abs=0)
    assert history["OutputGradientGeometry"][1]["layers"]["2"] == {
        "norm": expected,
        "correlation": pytest.approx(1),
    }
    assert history["without"][1]["layers"]["2"] == {"norm": expected}
    expected = pytest.approx(5e-25 * math.sqrt(3), rel=1e-5, abs=0)
    found = history["GradientGeometry"][1]["parameters"]["2.bias"]
    assert found == {"norm": expected, "correlation": pytest.approx(1)}


@pytest.mark.parametrize("place", [nullcontext, SimulatedDevice])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_powers_of_two_near_the_largest_number(
    dtype: torch.dtype, place: type[AbstractContextManager[object]]
) -> None:
    limits = torch.finfo(dtype)
    usual = [1.0, 3.7, -5.0, 1e-3, 100.0, 2 * limits.tiny, limits.max / 4]
    others = [0.0, limits.tiny / 4, limits.max, math.inf, -math.inf, math.nan]
    tensors = {x: torch.tensor([0.0, x, 0.1 * x], dtype=dtype) for x in (*usual, *others)}
    with place():
        scales = {x: float(scale_of(values)) for x, values in tensors.items()}
    for largest, scale in scales.items():
        assert math.frexp(scale)[0] == 0.5
        if largest in usual:
            assert 0.5 <= abs(float(tensors[largest][1])) / scale < 2
        if not math.isfinite(largest):
            assert scale == 1
