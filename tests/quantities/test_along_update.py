"""Critical sharpness and the ledger of a step, against the loss in float64 along the update."""

from __future__ import annotations

import math
import re
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
from tests.cases.curvature_cases import SquareOnce
from tests.cases.processes import in_process_group
from tests.cases.records import assert_same_records
from tests.cases.references import gradients_of
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward
from tests.quantities.networks import Attention, Recurrent, Residual, mlp

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
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) <= 0 else (low, middle)
    return 2 / (low + high)


def slow_ledger(loss: Callable[[Values], Tensor], start: Values, end: Values) -> dict[str, Any]:
    moved = {n: end[n] - p for n, p in start.items()}
    leaves = {n: p.clone().requires_grad_() for n, p in start.items()}
    gradient = gradients_of(loss(leaves), leaves, create_graph=True)
    slope = torch.stack([(g * moved[n]).sum() for n, g in gradient.items()]).sum()
    curved = gradients_of(slope, leaves)
    first = {n: float((gradient[n].detach() * d).sum()) for n, d in moved.items()}
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


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (mlp, "momentum"),
    "residual": (Residual, "AdamW"),
    "dropout": (WithDropout, "gradient descent"),
    "recurrent": (Recurrent, "AdamW"),
    "attention": (Attention, "momentum"),
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


def assert_ratio(record: Any, slow: float) -> None:
    assert record["low"] <= record["ratio"] <= record["high"]
    assert record["low"] * (1 - 1e-3) <= slow <= record["high"] * (1 + 1e-3)
    if record["passes"] < TRIES + 2:
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


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    network, optimizer = NETWORKS[name]
    found, narrow = train(network, OPTIMIZERS[optimizer]), 0
    for step in range(STEPS):
        line = found.losses[step], found.starts[step], found.ends[step]
        ledger = found.history["StepLedger"][step]
        slow = slow_ledger(*line)
        for name, terms in slow.pop("layers").items():
            assert ledger["layers"][name] == pytest.approx(terms, rel=1e-8, abs=1e-12)
        for name, term in slow.items():
            assert ledger[name] == pytest.approx(term, rel=1e-8, abs=1e-12)
        record = found.history["CriticalSharpness"][step]
        assert_ratio(record, slow_ratio(*line))
        narrow += record["passes"] < TRIES + 2
    assert narrow >= 1


def test_losses_and_steps_of_other_sizes() -> None:
    """A multiple of the loss is one of the rate of SGD, and nothing to Adam; so is a sum loss."""

    def value(make: Callable[..., Optimizer], **options: Any) -> dict[str, Any]:
        found = train(mlp, make, [CriticalSharpness()], steps=1, **options)
        return found.history["CriticalSharpness"][0]

    unit, adam = 2.0**20, partial(optim.Adam, eps=0.0)
    for make, scaled, law in ((SGD, partial(optim.SGD, lr=0.05 / unit), unit), (adam, adam, 1.0)):
        one, other = value(make), value(scaled, unit=unit)
        laws = {name: law if name in ("sharpness", "threshold") else 1.0 for name in one}
        assert other == pytest.approx({name: one[name] * laws[name] for name in one})
    found = value(partial(optim.SGD, lr=0.05 / 8), unit=8.0, loss_reduction="sum")
    assert found["ratio"] == pytest.approx(value(SGD)["ratio"])
    assert "batch_size" in found["sharpness"].reason == found["threshold"].reason


def test_micro_batches_have_the_values_of_the_whole_batch() -> None:
    whole, parts = train(mlp, steps=1), train(mlp, parts=4, steps=1)
    for name in ("CriticalSharpness", "StepLedger"):
        assert_same_records(parts.history[name], whole.history[name], rtol=1e-8)


def test_autocast_and_single_precision() -> None:
    make = partial(optim.SGD, lr=0.3)
    for network, dtype, autocast, rtol in (
        (Recurrent, torch.float32, False, 1e-3),
        (mlp, torch.float32, True, 0.1),
    ):
        found = train(network, make, dtype=dtype, autocast=autocast)
        for step in range(STEPS):
            line = found.losses[step], found.starts[step], found.ends[step]
            slow, ledger = slow_ledger(*line), found.history["StepLedger"][step]
            assert ledger["change"] == pytest.approx(slow["change"], rel=rtol)
            assert ledger["first"] == pytest.approx(slow["first"], rel=rtol)
            ratio = found.history["CriticalSharpness"][step]["ratio"]
            assert ratio == pytest.approx(slow_ratio(*line), rel=max(rtol, 0.05))


# Nothing else changes ---------------------------------------------------------------------------


class Counting(nn.Module):
    """A layer that is used at every other call, and a list of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.calls, self.seen, self.last = 0, list[float](), {"mean": 0.0}
        self.by_name = {"means": list[float]()}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layers[self.calls // 2 % 2](x)
        self.seen.append(float(out.detach().mean()))
        self.last["mean"], self.latest = self.seen[-1], out
        self.by_name["means"].append(self.seen[-1])
        return out


def test_what_modules_count_and_collect_is_left_as_it_was() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    models: list[Counting] = []
    for quantities in (both(), []):
        torch.manual_seed(0)
        model = Counting()
        optimizer = SGD(model.parameters())
        cockpit = Cockpit(model, quantities, strict=True)
        for step in range(4):
            x = torch.randn(5, 4)
            loss, closure = loss_of(model, x), partial(loss_of, model, x)
            optimizer.zero_grad()
            tracked_backward(cockpit, step, loss, optimizer=optimizer, closure=closure)
            optimizer.step()
        cockpit.close()
        models.append(model)
    one, other = models
    assert (one.calls, one.seen, one.last) == (other.calls, other.seen, other.last)
    assert one.by_name == other.by_name
    assert torch.equal(one.latest, other.latest)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_the_model_is_left_as_it_was() -> None:
    """Also weights that are attributes, modes, and the versions that autograd counts."""
    torch.manual_seed(0)
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = nn.utils.weight_norm(nn.Linear(4, 3))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 1))
    optimizer = SGD(model.parameters())
    x = torch.randn(5, 4)

    def closure() -> Tensor:
        model.eval()
        return model(x).square().mean()

    cockpit = Cockpit(model, both(), strict=True)
    tracked_backward(cockpit, 0, model(x).square().mean(), optimizer=optimizer, closure=closure)
    weight, versions = layer.weight, [p._version for p in model.parameters()]
    optimizer.step()
    assert cockpit.history["CriticalSharpness"][0]["ratio"] > 0
    assert layer.weight is weight
    assert all(module.training for module in model.modules())
    assert [p._version for p in model.parameters()] == [each + 1 for each in versions]


def returning(*order: str) -> nn.Module:
    """Returns several things, of which a loss takes the first tensor."""

    def compute(net: Any, x: Tensor) -> list[Any]:
        out = net.inner(x)
        made = {"output": out, "cache": object(), "loss": out.square().mean(), "input": x}
        return [made[name] for name in order]

    return Net(compute, inner=mlp())


@pytest.mark.parametrize(
    "order", ["output cache", "cache output", "loss input output cache", "loss cache"]
)
def test_what_a_parallel_model_returns_beside_tensors(order: str) -> None:
    """``find_unused_parameters`` puts a function behind all that a model returns."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        first: Tensor = next(each for each in model(x) if isinstance(each, Tensor))
        return first.square().mean()

    def value(wrap: Callable[[nn.Module], nn.Module]) -> Any:
        torch.manual_seed(0)
        model, x = wrap(returning(*order.split()).double()), torch.randn(6, 4).double()
        optimizer = SGD(model.parameters())
        cockpit = Cockpit(model, [StepLedger()], facts=False, autopsy=False)
        loss = loss_of(model, x)
        with cockpit(0, loss=loss, optimizer=optimizer, closure=partial(loss_of, model, x)):
            loss.backward()
        optimizer.step()
        return cockpit.history["StepLedger"][0]

    parallel = partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True)
    found = in_process_group(partial(value, parallel))
    if order == "loss cache":  # torch knows both as tensors without axes
        assert "isn't known which is which" in found.reason
    else:
        expected = value(lambda model: model)
        for name in ("change", "first", "second"):
            assert found[name] == pytest.approx(expected[name], rel=1e-9)


# Bad input --------------------------------------------------------------------------------------


def step_with(
    closure: Callable[[nn.Module, Tensor], Any],
    make: Callable[..., Optimizer] = SGD,
    network: Callable[[], nn.Module] = mlp,
    change: Callable[[nn.Module], None] = lambda model: None,
    tracked: Sequence[Quantity] | None = None,
    **given: Any,
) -> tuple[Any, Any]:
    """Both values after a step on the mean square, of which a closure may make what it likes."""
    torch.manual_seed(0)
    model, x = network(), torch.randn(6, 4)
    optimizer = make(model.parameters())
    cockpit = Cockpit(model, both() if tracked is None else tracked)
    loss = model(x).square().mean()
    with cockpit(0, loss=loss, optimizer=optimizer, closure=partial(closure, model, x), **given):
        loss.backward()
    change(model)
    ends = [p.clone() for p in model.parameters()]
    optimizer.step()
    moved = [not torch.equal(p, e) for p, e in zip(model.parameters(), ends, strict=True)]
    assert any(moved) or optimizer.param_groups[0]["lr"] == 0
    return cockpit.history["CriticalSharpness"][0], cockpit.history["StepLedger"][0]


def right(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def two_rates(parameters: Any) -> Optimizer:
    first, *others = parameters
    groups = [{"params": [first], "lr": 0.2}, {"params": others}]
    return optim.SGD(groups, lr=0.1)


def of_some(parameters: Any) -> Optimizer:
    return optim.SGD([*parameters][:2], lr=0.1)


def broken(model: nn.Module) -> None:
    next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]


REFUSED: dict[str, tuple[str, Callable[[], tuple[Any, Any]]]] = {
    "another batch": (
        "the closure's loss is", lambda: step_with(lambda model, x: right(model, x[:3]))
    ),
    "a new batch in each call": (
        "draws no random|two calls",
        lambda: step_with(lambda model, x: right(model, x * next(FACTORS))),
    ),
    "a number": ("returned a float", lambda: step_with(lambda *given: right(*given).item())),
    "losses": ("of shape \\[6, 2\\]", lambda: step_with(lambda model, x: model(x).square())),
    "zero rate": ("the update is zero", lambda: step_with(right, partial(optim.SGD, lr=0.0))),
    "not finite": ("the update has NaN", lambda: step_with(right, change=broken)),
    "a part of the parameters": ("doesn't have 2.weight", lambda: step_with(right, of_some)),
}  # fmt: skip
FACTORS = iter([1.0, *(1 + 0.005 * n for n in range(1, 40))])


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    words, values = REFUSED[case]
    for value in values():
        assert re.search(words, value.reason), value.reason


def test_a_closure_that_fails_is_noted() -> None:
    def fails(*_: Any) -> Tensor:
        raise KeyError("missing")

    with (
        pytest.warns(UserWarning, match=r"StepLedger failed: .*missing"),
        pytest.warns(UserWarning, match=r"CriticalSharpness failed: .*missing"),
    ):
        sharpness, ledger = step_with(fails)
    assert "missing" in sharpness.reason
    assert "missing" in ledger.reason


def test_several_rates_have_a_ratio_alone() -> None:
    sharpness, _ = step_with(right, two_rates)
    assert sharpness["low"] <= sharpness["ratio"] <= sharpness["high"]
    assert "2 learning rates" in sharpness["sharpness"].reason == sharpness["threshold"].reason


def test_a_step_uphill_has_no_ratio() -> None:
    uphill, ledger = step_with(right, partial(optim.SGD, lr=0.01, maximize=True))
    assert "doesn't lead downhill" in uphill["ratio"].reason == uphill["sharpness"].reason
    assert uphill["threshold"] == 200
    assert ledger["first"] > 0


def test_a_loss_that_never_rises_has_no_ratio_at_any_step() -> None:
    """Searches begin where the last one has ended, and don't get out of the range of numbers."""
    model = nn.Linear(4, 1)
    optimizer, quantity = SGD(model.parameters()), CriticalSharpness()
    quantity.load_state_dict({"last": 1e308})
    cockpit = Cockpit(model, [quantity], strict=True)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).sum()
        closure = lambda: model(torch.ones(3, 4)).sum()  # noqa: E731
        tracked_backward(cockpit, step, loss, optimizer=optimizer, closure=closure, batch_size=3)
        optimizer.step()
        value = cockpit.history["CriticalSharpness"][step]
        assert "isn't higher than before the step at any rate" in value["ratio"].reason


def test_what_is_needed_is_said() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"pass the model, as in Cockpit\(model"):
        Cockpit(model.parameters(), [CriticalSharpness()])
    cockpit, loss = Cockpit(model, both()), right(model, torch.randn(3, 4))
    optimizer = SGD(model.parameters())
    with (
        pytest.raises(ValueError, match="CriticalSharpness needs the closure: pass closure="),
        cockpit(0, loss=loss, optimizer=optimizer),
    ):
        pass
    with pytest.raises(TypeError, match=r"closure=.* is no function"):
        cockpit(0, loss=loss, optimizer=optimizer, closure=loss)


def test_without_a_second_derivative_there_is_the_first_term() -> None:
    def once(model: nn.Module, x: Tensor) -> Tensor:
        return SquareOnce.apply(model(x)).mean()

    sharpness, ledger = step_with(once)
    assert sharpness["ratio"] > 0
    assert ledger["first"] == pytest.approx(step_with(right)[1]["first"])
    assert "twice" in ledger["second"].reason == ledger["rest"].reason


# The search -------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [1e-3, 0.02, 0.9, 1.0, 3.0, 70.0])
def test_search_on_quadratics(root: float) -> None:
    tried: list[float] = []
    found = search(lambda s: tried.append(s) or s * (s - root), 1e-15)
    assert found.multiple == pytest.approx(root, rel=1e-9)
    assert found.low <= root <= found.high <= found.low * (1 + RESOLUTION)
    assert len(tried) <= TRIES


@pytest.mark.parametrize(
    ("rise", "reason"),
    [
        (lambda s: -s, "at any rate up to 64"),
        (lambda s: s, "downhill"),
        (lambda s: max(s - 3, 0.0), "too small"),
    ],
)
def test_searches_that_find_nothing(rise: Callable[[float], float], reason: str) -> None:
    assert reason in search(rise, 1e-15).reason


def test_searches_of_losses_that_end_or_rise_late() -> None:
    diverges = search(lambda s: -s if s < 3 else math.nan, 1e-15)
    assert diverges.low < 3 <= diverges.high <= 2 * diverges.low
    late = search(lambda s: s - 100, 1e-15, first=search(lambda s: -s, 1e-15).guess)
    assert late.multiple == pytest.approx(100, rel=1e-3)


# Where the loss comes from ----------------------------------------------------------------------


def test_with_a_probe_it_is_the_loss_of_the_probe() -> None:
    """Over several batches, in eval mode; the loop passes no closure."""
    torch.manual_seed(0)
    model = Residual()
    x, y = torch.randn(9, 4), torch.randn(9, 2)
    probe = Probe([(x[:4], y[:4]), (x[4:], y[4:])], nn.MSELoss())
    tracked = [CriticalSharpness(on=probe), StepLedger(on=probe)]
    cockpit, optimizer = Cockpit(model.double(), tracked, strict=True), SGD(model.parameters())
    probe.data[:] = [(a.double(), b.double()) for a, b in probe.data]  # type: ignore[index]
    tracked_backward(cockpit, 0, squared_error(model(x.double()), y.double()), optimizer=optimizer)
    start, modes = _copied(model), [module.training for module in model.modules()]
    optimizer.step()
    assert modes == [module.training for module in model.modules()]
    model.eval()
    state = torch.get_rng_state(), np.random.get_state()[1:3]
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    line = _slow_loss(model, x, y, 1.0, buffers, state), start, _copied(model)
    slow, ledger = slow_ledger(*line), cockpit.history["StepLedger"][0]
    assert {**ledger, "layers": 0} == pytest.approx({**slow, "layers": 0}, rel=1e-9)
    assert_ratio(cockpit.history["CriticalSharpness"][0], slow_ratio(*line))
