"""Largest singular values by subspaces, against those of whole matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradlens.numerics.singular_values import Largest, largest, subspace


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


MATRICES: dict[str, Callable[[], Tensor]] = {
    "square": lambda: random(64, 64),
    "high": lambda: random(200, 30),
    "flat spectrum": lambda: random(150, 300),
    "kernels": lambda: random(6, 3, 3, 3),
    "one row": lambda: random(1, 5),
    "one element": lambda: random(1, 1),
    "low rank": lambda: random(90, 2) @ random(2, 80),
    "multiple": lambda: torch.eye(40, dtype=torch.float64),
    "one entry": lambda: torch.zeros(70, 90).double().index_fill_(0, torch.tensor([3]), 2.0),
}


def found(matrix: Tensor, kept: Tensor | None = None, seed: int = 1) -> tuple[Largest, Tensor]:
    space = subspace(matrix, kept, torch.Generator().manual_seed(seed))
    top = largest(space.products, space.rounding)
    return top, space.vectors @ top.combinations.to(space.vectors)


def exact(matrix: Tensor) -> Tensor:
    wide = torch.complex128 if matrix.is_complex() else torch.float64
    return torch.linalg.svdvals(matrix.flatten(1).to(wide))


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", MATRICES)
def test_the_largest_is_within_its_residual(name: str, dtype: torch.dtype, size: float) -> None:
    matrix = (size * MATRICES[name]()).to(dtype)
    top, _ = found(matrix)
    values = exact(matrix)
    share = float(values[0] / values.square().sum().sqrt())
    rounding = 1e-6 if dtype != torch.float64 else 1e-14
    assert top.share == pytest.approx(share, rel=1e-5 if name == "flat spectrum" else rounding)
    assert abs(top.share - share) <= top.residual
    assert top.share <= share * (1 + rounding)


def test_kept_vectors_make_it_more_exact() -> None:
    matrix = random(400, 300)
    value = exact(matrix)[0] / matrix.norm()
    errors, kept = [], None
    for seed in range(4):
        top, kept = found(matrix, kept, seed)
        errors.append(float(value - top.share))
        assert errors[-1] <= top.residual
    assert errors[-1] < 1e-2 * errors[0]


def test_another_value_that_becomes_the_largest_is_found() -> None:
    """The vectors that are kept span a space that the matrix doesn't leave."""
    sizes = torch.linspace(1, 2, 60, dtype=torch.float64)
    _, kept = found(torch.diag(sizes))
    kept = torch.eye(60, dtype=torch.float64)[:, -3:]
    sizes[10] = 4.0
    top, _ = found(torch.diag(sizes), kept)
    assert top.share == pytest.approx(4 / float(sizes.norm()), rel=1e-3)


def test_vectors_of_another_shape_are_left_out() -> None:
    top, _ = found(random(20, 10), torch.ones(7, 3, dtype=torch.float64))
    assert top.share == found(random(20, 10))[0].share


def test_infinite_products_have_no_values() -> None:
    space = subspace(torch.full((5, 4), torch.inf), None, torch.Generator())
    assert largest(space.products, space.rounding) is None
