"""The neural tangent kernel equals products of dense Jacobians, and what has none is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

from gradlens.curvature import factors, ntk, tangent_kernel
from gradlens.numerics.unavailable import UnavailableError
from tests.cases.curvature_cases import MODELS, frozen, perceptron
from tests.cases.networks import NETWORKS
from tests.cases.references import as_function
from tests.cases.row_cases import Net

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def jacobian(model: nn.Module, inputs: Tensor) -> Tensor:
    """``[N, K, D]``, by torch.func."""
    flat, outputs = as_function(model, inputs)
    return jacrev(outputs)(flat).reshape(len(inputs), -1, len(flat))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


ACROSS = ("perceptron", "convolutional", "normalised", "frozen")
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    **{name: (build, lambda n: draw(n, 4)) for name, build in MODELS.items() if name in ACROSS},
    **{
        name: (NETWORKS[name].build, NETWORKS[name].inputs)
        for name in ("linear, sequence", "conv2d", "tied weights", "module used twice", "prelu")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_products_of_jacobians(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = CASES[name]
    model, x, other = build().double(), inputs(3), inputs(2)
    one, two = jacobian(model, x), jacobian(model, other)
    shape = [*model(x).shape[1:]]
    among, between = ntk(model, x), ntk(model, x, other)
    assert [*between.shape] == [3, 2, *shape, *shape]
    assert [*among.shape] == [3, 3, *shape, *shape]
    expected = torch.einsum("nid,mjd->nmij", one, two)
    torch.testing.assert_close(between, expected.reshape(between.shape), **CLOSE)
    expected_among = torch.einsum("nid,mjd->nmij", one, one)
    torch.testing.assert_close(among, expected_among.reshape(among.shape), **CLOSE)
    traces = torch.einsum("nid,mid->nm", one, two)
    torch.testing.assert_close(ntk(model, x, other, trace=True), traces, **CLOSE)


def test_one_number_for_each_sample_has_no_axes_of_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)).double()
    x = draw(3, 4)
    (rows,) = jacobian(model, x).unbind(1)
    for trace in (False, True):
        torch.testing.assert_close(ntk(model, x, trace=trace), rows @ rows.T, **CLOSE)


def test_kernels_of_some_parameters() -> None:
    model, x = perceptron().double(), draw(3, 4)
    rows = jacobian(model, x)
    last = rows[..., -15:]
    expected = torch.einsum("nid,mjd->nmij", last, last)
    torch.testing.assert_close(ntk(model, x, parameters=["2"]), expected, **CLOSE)
    assert ntk(frozen().double(), x).shape == (3, 3, 3, 3)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 2)).double()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    x, random = draw(3, 4), torch.get_rng_state()
    ntk(model, x)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)
    assert [module.training for module in model] == [True, False, True]
    assert torch.equal(torch.get_rng_state(), random)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "coupled": (
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
        UnavailableError,
        "in eval mode",
    ),
    "dropout": (nn.Sequential(nn.Linear(4, 3), nn.Dropout()), ValueError, "model.eval"),
    "a tuple": (
        Net(lambda net, x: (net.layer(x), x), layer=nn.Linear(4, 3)),
        ValueError,
        "one tensor",
    ),
    "one number": (nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), UnavailableError, "sample"),
    "frozen": (nn.Linear(4, 3).requires_grad_(False), ValueError, "no parameters"),
    "NaN": (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), UnavailableError, "contain NaN"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_kernel_is_refused(case: str) -> None:
    model, kind, reason = REFUSED[case]
    if case == "NaN":
        nn.init.constant_(model[1].weight, float("nan"))
    with pytest.raises(kind, match=reason):
        ntk(model.double(), draw(3, 4))


def test_other_inputs_and_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3).double()
    assert ntk(model, draw(3, 2, 4), draw(2, 4)).shape == (3, 2, 2, 3, 3)
    with pytest.raises(ValueError, match="leave out trace"):
        ntk(model, draw(3, 2, 4), draw(2, 4), trace=True)
    with pytest.raises(ValueError, match="no parameter or module 'head'"):
        ntk(model, draw(3, 4), parameters=["head"])
    monkeypatch.setattr(factors, "MAX_BYTES", 10)
    with pytest.raises(UnavailableError, match="take fewer samples at once"):
        ntk(model, draw(3, 4), trace=True)
    monkeypatch.setattr(tangent_kernel, "MAX_BYTES", 10)
    with pytest.raises(UnavailableError, match="pass fewer samples at once"):
        ntk(model, draw(3, 4))
