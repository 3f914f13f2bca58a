"""Critical sharpness and the ledger of a step, against the loss in float64 along the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from gradlens import Cockpit
from gradlens.curvature import Probe
from gradlens.history.history import History
from gradlens.quantities import CriticalSharpness, Quantity, StepLedger
from gradlens.quantities.along_update import RESOLUTION, TRIES, search
from tests.quantities.test_optimizer_state import Attention, Recurrent, Residual, mlp

STEPS = 2
Values = dict[str, Tensor]

# The slow evaluation ----------------------------------------------------------------------------


@dataclass
class Trained:
    history: History
    state: Any = None
    starts: list[Values] = field(default_factory=list)
    ends: list[Values] = field(default_factory=list)
    losses: list[Callable[[Values], Tensor]] = field(default_factory=list)
    """Of each step's batch, as functions of the parameters in float64."""


def slow_ratio(loss: Callable[[Values], Tensor], start: Values, end: Values) -> float:
    """One over the first multiple at which the loss rises, of those on a grid."""

    def at(multiple: float) -> float:
        moved = {n: p + multiple * (end[n] - p) for n, p in start.items()}
        return float(loss(moved)) - before

    before = float(loss(start))
    high = 0.05
    while at(high) <= 0:
        high *= 1.5
    low = high / 1.5
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) <= 0 else (low, middle)
    return 2 / (low + high)


def slow_ledger(loss: Callable[[Values], Tensor], start: Values, end: Values) -> dict[str, Any]:
    moved = {n: end[n] - p for n, p in start.items()}
    leaves = {n: p.clone().requires_grad_() for n, p in start.items()}
    found = torch.autograd.grad(loss(leaves), [*leaves.values()], create_graph=True)
    gradient = dict(zip(leaves, (each.detach() for each in found), strict=True))
    slope = torch.stack([(g * moved[n]).sum() for n, g in zip(leaves, found, strict=True)]).sum()
    curved = dict(zip(leaves, torch.autograd.grad(slope, [*leaves.values()]), strict=True))
    first = {n: float((gradient[n] * d).sum()) for n, d in moved.items()}
    second = {n: float((curved[n] * d).sum()) / 2 for n, d in moved.items()}
    layers: dict[str, dict[str, float]] = {}
    for name in moved:
        sums = layers.setdefault(name.rpartition(".")[0] or name, {"first": 0.0, "second": 0.0})
        sums["first"] += first[name]
        sums["second"] += second[name]
    change = float(loss(end) - loss(start))
    totals = sum(first.values()), sum(second.values())
    rest = change - sum(totals)
    return {
        "change": change, "first": totals[0], "second": totals[1], "rest": rest, "layers": layers
    }  # fmt: skip


class WithDropout(Residual):
    """Convolutions with batch normalisation, and dropout by torch's and by numpy's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + 0.1 * np.random.rand() if self.training else 1.0
        return scale * super().forward(self.dropout(x))


class Quadratic(nn.Module):
    """½xᵀHx + cᵀx in the parameters, whatever it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))
        root = torch.randn(5, 5)
        self.register_buffer("matrix", root @ root.T)
        self.register_buffer("vector", torch.randn(5))

    def forward(self, _: Tensor) -> Tensor:
        x = torch.cat([self.a, self.b])
        return x @ self.matrix @ x / 2 + self.vector @ x


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "residual": Residual,
    "dropout": WithDropout,
    "recurrent": Recurrent,
    "attention": Attention,
}
SGD = partial(optim.SGD, lr=0.05)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "gradient descent": SGD,
    "momentum": partial(optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True),
    "AdamW": partial(optim.AdamW, lr=0.01),
}


def both() -> list[Quantity]:
    return [CriticalSharpness(), StepLedger()]


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return output if output.dim() == 0 else (output - targets).square().mean()


def train(
    network: Callable[[], nn.Module],
    make: Callable[..., Optimizer] = SGD,
    tracked: Sequence[Quantity] | None = None,
    parts: int = 1,
    dtype: torch.dtype = torch.float64,
    autocast: bool = False,
    unit: float = 1.0,
    steps: int = STEPS,
    **options: Any,
) -> Trained:
    """Training with the rate lowered from step to step, and what the slow evaluation needs."""
    torch.manual_seed(0)
    np.random.seed(0)
    model = network().to(dtype)
    optimizer = make(model.parameters())
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    cockpit = Cockpit(model, both() if tracked is None else tracked, strict=True, **options)
    found = Trained(cockpit.history)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = torch.randn(8, 4, dtype=dtype), torch.randn(8, 2, dtype=dtype)
        pieces = [*zip(inputs.chunk(parts), targets.chunk(parts), strict=True)]

        def whole(model: nn.Module = model, pieces: Any = pieces) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses = [unit * squared_error(model(x), y) / parts for x, y in pieces]
            return torch.stack(losses).sum()

        for part, (x, y) in enumerate(pieces, 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = unit * squared_error(model(x), y) / parts
            with cockpit(
                step,
                loss=loss,
                loss_scale=1 / parts,
                optimizer=optimizer,
                accumulating=part < parts,
                closure=whole,
            ):
                loss.backward()
        before = torch.get_rng_state(), np.random.get_state()[1:3]
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        gradients = [p.grad for p in model.parameters()]
        found.starts.append(_copied(model))
        found.losses.append(_slow_loss(model, inputs, targets, unit, buffers, before))
        optimizer.step()
        found.ends.append(_copied(model))
        assert torch.equal(before[0], torch.get_rng_state())
        assert np.array_equal(before[1][0], np.random.get_state()[1])
        assert before[1][1] == np.random.get_state()[2]
        assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
        assert all(a is p.grad for a, p in zip(gradients, model.parameters(), strict=True))
        scheduler.step()
    cockpit.close()
    assert not cockpit.history.notes
    found.state = model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
    return found


def _copied(model: nn.Module) -> Values:
    return {n: p.detach().clone().double() for n, p in model.named_parameters()}


def _slow_loss(
    model: nn.Module, x: Tensor, y: Tensor, unit: float, buffers: Values, state: Any
) -> Callable[[Values], Tensor]:
    fixed = {n: b.double() if b.is_floating_point() else b for n, b in buffers.items()}
    x, y = x.double(), y.double()

    def loss(parameters: Values) -> Tensor:
        own = torch.get_rng_state(), np.random.get_state()
        torch.set_rng_state(state[0])
        np.random.set_state(("MT19937", *state[1], 0, 0.0))
        copies = {n: b.clone() for n, b in fixed.items()}
        with sdpa_kernel(SDPBackend.MATH):
            output = functional_call(model, parameters | copies, (x,))
        torch.set_rng_state(own[0])
        np.random.set_state(own[1])
        return unit * squared_error(output, y)

    return loss


def assert_ratio(record: Any, slow: float, is_first: bool = False) -> None:
    assert record["low"] <= record["ratio"] <= record["high"]
    assert record["low"] * (1 - 1e-3) <= slow <= record["high"] * (1 + 1e-3)
    if not is_first:  # where the search begins at the update itself
        assert record["high"] <= record["low"] * (1 + RESOLUTION) * (1 + 1e-9)
        assert record["ratio"] == pytest.approx(slow, rel=0.02)
    assert record["ratio"] == pytest.approx(record["sharpness"] / record["threshold"])
    assert record["passes"] <= TRIES + 2 < 10


# Right values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_quadratics_have_closed_forms(optimizer: str) -> None:
    found = train(Quadratic, OPTIMIZERS[optimizer])
    rate = OPTIMIZERS[optimizer].keywords["lr"]  # type: ignore[attr-defined]
    for step in range(STEPS):
        slow = slow_ledger(found.losses[step], found.starts[step], found.ends[step])
        ledger, record = (found.history[n][step] for n in ("StepLedger", "CriticalSharpness"))
        assert abs(ledger["rest"]) < 1e-13 * abs(ledger["first"])
        assert ledger["first"] == pytest.approx(slow["first"], rel=1e-12)
        assert ledger["second"] == pytest.approx(slow["second"], rel=1e-12)
        assert record["threshold"] == pytest.approx(2 / (rate * 0.9**step))
        assert record["ratio"] == pytest.approx(-slow["second"] / slow["first"], rel=1e-9)
        if optimizer == "gradient descent":
            torch.manual_seed(0)
            model: Any = Quadratic().double()
            g = model.matrix @ torch.cat([*found.starts[step].values()]) + model.vector
            assert record["sharpness"] == pytest.approx(float(g @ model.matrix @ g / (g @ g)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_networks(network: str, optimizer: str) -> None:
    found = train(NETWORKS[network], OPTIMIZERS[optimizer])
    for step in range(STEPS):
        line = found.losses[step], found.starts[step], found.ends[step]
        ledger = found.history["StepLedger"][step]
        slow = slow_ledger(*line)
        for name, terms in slow.pop("layers").items():
            assert ledger["layers"][name] == pytest.approx(terms, rel=1e-8, abs=1e-12)
        for name, term in slow.items():
            assert ledger[name] == pytest.approx(term, rel=1e-8, abs=1e-12)
        record = found.history["CriticalSharpness"][step]
        assert_ratio(record, slow_ratio(*line), is_first=step == 0)
