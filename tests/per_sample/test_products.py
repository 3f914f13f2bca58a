"""Weights on either side of matrix products, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradlens
from tests.cases.references import assert_covered
from tests.cases.row_cases import Net

N, ROWS, COLUMNS, MATRICES = 4, 3, 5, 2


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def columns(x: Tensor) -> Tensor:
    """A column for each sample, ``[MATRICES, COLUMNS, N]``."""
    return x.permute(1, 2, 0)


def rows(x: Tensor) -> Tensor:
    """A row for each sample, ``[MATRICES, N, COLUMNS]``."""
    return x.transpose(0, 1)


Product = Callable[[Tensor, Tensor], Tensor]
"""Of weights ``[MATRICES, ROWS, COLUMNS]`` and inputs ``[N, MATRICES, COLUMNS]``, with a row for
each sample."""

PRODUCTS: dict[str, Product] = {
    "mm, left": lambda w, x: (w[0] @ columns(x)[0]).T,
    "mm, right": lambda w, x: x[:, 0] @ w[0].T,
    "addmm, left": lambda w, x: torch.addmm(draw(ROWS, N), w[0], columns(x)[0], alpha=0.3).T,
    "addmm, right": lambda w, x: torch.addmm(draw(N, ROWS), x[:, 0], w[0].T, alpha=0.3),
    "bmm, left": lambda w, x: torch.bmm(w, columns(x)).permute(2, 0, 1),
    "bmm, right": lambda w, x: torch.bmm(rows(x), w.mT).transpose(0, 1),
    "baddbmm, left": lambda w, x: torch.baddbmm(
        draw(MATRICES, ROWS, N), w, columns(x), alpha=0.3
    ).permute(2, 0, 1),
    "baddbmm, right": lambda w, x: torch.baddbmm(
        draw(MATRICES, N, ROWS), rows(x), w.mT, alpha=0.3
    ).transpose(0, 1),
    "matmul, left": lambda w, x: (w @ x[..., None])[..., 0],
    "einsum": lambda w, x: torch.einsum("brc,nbc->nbr", w, x),
    "einsum, weight first": lambda w, x: torch.einsum("brc,cbn->nbr", w, x.permute(2, 1, 0)),
    "einsum of three": lambda w, x: torch.einsum("brc,nbc,cd->nrd", w, x, draw(COLUMNS, 2)),
    "each sample's own matrix": lambda w, x: (
        w.flatten(1)
        @ torch.stack([torch.kron(torch.eye(ROWS).double(), one.sum(0)[:, None]) for one in x])
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_weights_of_products(name: str) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(draw(MATRICES, ROWS, COLUMNS))
    model = gradlens.extend(Net(lambda net, x: PRODUCTS[name](net.weight, x), weight=weight))
    for _ in range(3):
        outputs = model(draw(N, MATRICES, COLUMNS))
        assert_covered(model, outputs.tanh().square().flatten(1).sum(1))
