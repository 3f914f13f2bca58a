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

N = 7
Outputs = dict[str, Tensor]


class Heads(nn.Module):
    """Classes, positions ``[N, 2, 2]`` and a flag, from a layer that is returned as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = nn.Linear(3, 4), nn.Linear(4, 3)
        self.positions, self.flag = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Outputs:
        hidden = self.body(x).tanh()
        return {
            "hidden": hidden,
            "classes": self.classes(hidden),
            "positions": self.positions(hidden).sin().reshape(-1, 2, 2),
            "flag": self.flag(hidden)[:, 0],
        }


class Chosen(nn.Module):
    """Those outputs as a tuple, in a list, or by name."""

    def __init__(self, heads: Heads, pack: Callable[[Outputs], Any]) -> None:
        super().__init__()
        self.heads, self.pack = heads, pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.heads(x))


def loss_of(outputs: Outputs, targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    classes, positions, flag = targets
    found = cross_entropy(outputs["classes"], classes) + mse_loss(outputs["positions"], positions)
    return found + binary_cross_entropy_with_logits(outputs["flag"], flag)


NAMES = ("classes", "positions", "flag")


@pytest.fixture
def problem() -> tuple[Heads, Tensor, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Heads().double()
    inputs = torch.randn(N, 3, dtype=torch.float64)
    targets = torch.randint(3, (N,)), torch.randn(N, 2, 2).double(), torch.rand(N).double()
    return model, inputs, targets


def joined(found: Outputs) -> Tensor:
    return torch.cat([found["classes"], found["positions"].flatten(1), found["flag"][:, None]], 1)


def dense(model: Heads, inputs: Tensor, targets: Any) -> np.ndarray:
    """That of the same outputs in one tensor."""

    def loss(found: Tensor) -> Tensor:
        classes, positions, flag = found.split([3, 4, 1], 1)
        parts = {"classes": classes, "positions": positions.reshape(-1, 2, 2), "flag": flag[:, 0]}
        return loss_of(parts, targets)

    return references.dense_ggn(Chosen(model, joined), loss, inputs).detach().numpy()


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
    packed = Chosen(model, PACKED[how])

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
