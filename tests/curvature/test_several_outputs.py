"""The Gauss-Newton matrix of networks with several outputs, against dense Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from gradlens.curvature import GGNOperator, LowRankGGN
from gradlens.numerics.unavailable import UnavailableError
from tests.cases import references
from tests.cases.row_cases import Net

N = 7
Outputs = dict[str, Tensor]


def all_outputs(net: Any, x: Tensor) -> Outputs:
    """Classes, positions ``[N, 2, 2]`` and a flag, and the layer that they are computed from."""
    hidden = net.body(x).tanh()
    positions = net.positions(hidden).sin().reshape(-1, 2, 2)
    found = {"hidden": hidden, "classes": net.classes(hidden), "positions": positions}
    return found | {"flag": net.flag(hidden)[:, 0]}


def heads() -> nn.Module:
    layers = {"positions": nn.Linear(4, 4), "flag": nn.Linear(4, 1)}
    return Net(all_outputs, body=nn.Linear(3, 4), classes=nn.Linear(4, 3), **layers)


def chosen(model: nn.Module, pack: Callable[[Outputs], Any]) -> nn.Module:
    """Those outputs as a tuple, in a list, or by name."""
    return Net(lambda net, x: pack(net.heads(x)), heads=model)


def loss_of(outputs: Outputs, targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    classes, positions, flag = targets
    found = cross_entropy(outputs["classes"], classes) + mse_loss(outputs["positions"], positions)
    return found + binary_cross_entropy_with_logits(outputs["flag"], flag)


NAMES = ("classes", "positions", "flag")


@pytest.fixture
def problem() -> tuple[nn.Module, Tensor, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    model = heads().double()
    inputs = torch.randn(N, 3, dtype=torch.float64)
    targets = torch.randint(3, (N,)), torch.randn(N, 2, 2).double(), torch.rand(N).double()
    return model, inputs, targets


def joined(found: Outputs) -> Tensor:
    return torch.cat([found["classes"], found["positions"].flatten(1), found["flag"][:, None]], 1)


def dense(model: nn.Module, inputs: Tensor, targets: Any) -> np.ndarray:
    """That of the same outputs in one tensor."""

    def loss(found: Tensor) -> Tensor:
        classes, positions, flag = found.split([3, 4, 1], 1)
        parts = {"classes": classes, "positions": positions.reshape(-1, 2, 2), "flag": flag[:, 0]}
        return loss_of(parts, targets)

    return references.dense_ggn(chosen(model, joined), loss, inputs).detach().numpy()


def test_products(problem: Any) -> None:
    model, inputs, targets = problem
    outputs, parameters = model(inputs), dict(model.named_parameters())
    ggn = GGNOperator(loss_of(outputs, targets), [outputs[n] for n in NAMES], parameters)
    expected = dense(*problem)
    np.testing.assert_allclose(ggn @ np.eye(len(expected)), expected, rtol=1e-9, atol=1e-14)
    low_rank = LowRankGGN(ggn, model)
    eigenvalues = np.linalg.eigvalsh(expected)[::-1]
    np.testing.assert_allclose(low_rank.eigenvalues[:5], eigenvalues[:5], rtol=1e-9)


PACKED: dict[str, Callable[[Outputs], Any]] = {
    "a tuple": lambda found: tuple(found[n] for n in NAMES),
    "by name, with one that isn't used": lambda found: (
        {n: found[n] for n in NAMES} | {"other": -found["flag"]}
    ),
}


@pytest.mark.parametrize("how", PACKED)
def test_over_data(how: str, problem: Any) -> None:
    model, inputs, targets = problem
    packed = chosen(model, PACKED[how])

    def loss(outputs: Any, given: Any) -> Tensor:
        named = outputs if isinstance(outputs, dict) else dict(zip(NAMES, outputs, strict=True))
        return loss_of(named, given)

    batches = [
        (inputs[part], tuple(each[part] for each in targets)) for part in (slice(4), slice(4, N))
    ]
    operator = GGNOperator.over_data(packed, loss, batches)
    found, expected = operator @ np.eye(operator.shape[0]), dense(*problem)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14)


def test_outputs_at_which_the_loss_cannot_be_split(problem: Any) -> None:
    model, inputs, targets = problem
    outputs, parameters = model(inputs), dict(model.named_parameters())
    loss = loss_of(outputs, targets)
    for given, reason in (
        ([*outputs.values()], "one of the outputs is computed from another one"),
        ([outputs["flag"].detach(), -outputs["flag"]], "doesn't depend on the outputs"),
        ([], "doesn't depend on the outputs"),
    ):
        with pytest.raises(UnavailableError, match=reason):
            GGNOperator(loss, given, parameters)
    halves = model(inputs)["flag"], model(inputs[:3])["flag"]
    with pytest.raises(UnavailableError, match=r"shapes \[7\], \[3\] have different numbers"):
        GGNOperator(halves[0].square().sum() + halves[1].square().sum(), halves, parameters)
