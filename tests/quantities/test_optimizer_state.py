"""The optimizer's state and the gradients that it takes, against recursions in float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from gradlens import Cockpit
from gradlens.history.history import History
from gradlens.quantities import (
    ClippedGradNorm,
    GradNorm,
    OptimizerState,
    Quantity,
    RelativeUpdate,
    UpdateSize,
)
from gradlens.quantities.moments import Moments
from tests.cases.records import assert_same_records
from tests.cases.simulated_device import SimulatedDevice
from tests.cases.steps import tracked_backward
from tests.quantities.networks import Attention, Recurrent, Residual, mlp

STEPS = 3


@dataclass(frozen=True)
class Averages:
    """m and √v ``[*P]`` as an optimizer computes with them, and ε."""

    first: Tensor | None = None
    root: Tensor | None = None
    floor: float = 0.0


Recursion = Callable[[Sequence[Tensor]], Averages]
"""From all gradients of a parameter so far, in float64."""


def averaged(gradients: Sequence[Tensor], beta: float) -> Tensor:
    found = torch.zeros_like(gradients[0])
    for gradient in gradients:
        found = beta * found + (1 - beta) * gradient
    return found


def adam(gradients: Sequence[Tensor], beta2: float = 0.999) -> Averages:
    steps = len(gradients)
    first = averaged(gradients, 0.9) / (1 - 0.9**steps)
    second = averaged([g**2 for g in gradients], beta2) / (1 - beta2**steps)
    return Averages(first, second.sqrt(), 1e-8)


def amsgrad(gradients: Sequence[Tensor]) -> Averages:
    squares = [g**2 for g in gradients]
    every = [averaged(squares[: n + 1], 0.5) for n in range(len(squares))]
    root = (torch.stack(every).amax(0) / (1 - 0.5 ** len(squares))).sqrt()
    return Averages(adam(gradients).first, root, 1e-8)


def adamax(gradients: Sequence[Tensor]) -> Averages:
    root = torch.zeros_like(gradients[0])
    for gradient in gradients:
        root = torch.maximum(0.999 * root, gradient.abs() + 1e-8)
    return Averages(adam(gradients).first, root, 1e-8)


def momentum(gradients: Sequence[Tensor], mu: float = 0.9) -> Averages:
    found = torch.zeros_like(gradients[0])
    for gradient in gradients:
        found = mu * found + gradient
    return Averages(found)


def rmsprop(gradients: Sequence[Tensor], centered: bool = False) -> Averages:
    second = averaged([g**2 for g in gradients], 0.99)
    second = second - averaged(gradients, 0.99) ** 2 if centered else second
    return Averages(root=second.sqrt(), floor=1e-8)


def adadelta(gradients: Sequence[Tensor]) -> Averages:
    return Averages(root=averaged([g**2 for g in gradients], 0.9).sqrt(), floor=1e-3)


def adagrad(gradients: Sequence[Tensor]) -> Averages:
    return Averages(root=torch.stack([g**2 for g in gradients]).sum(0).sqrt(), floor=1e-10)


def adafactor(gradients: Sequence[Tensor]) -> Averages:
    is_matrix = gradients[0].dim() > 1
    rows, columns = 0.0, 0.0
    for number, gradient in enumerate(gradients, 1):
        beta = 1 - number**-0.8
        squares = gradient**2
        rows = beta * rows + (1 - beta) * (squares.mean(-1, True) if is_matrix else squares)
        columns = beta * columns + (1 - beta) * (squares.mean(-2, True) if is_matrix else squares)
    second: Any = rows @ columns / rows.mean(-2, True) if is_matrix else rows
    return Averages(root=second.sqrt(), floor=torch.finfo(torch.float64).eps)


CASES: dict[str, tuple[Callable[..., Optimizer], Recursion]] = {
    "Adam": (optim.Adam, adam),
    "Adam, one by one": (partial(optim.Adam, foreach=False), adam),
    "Adam, foreach": (partial(optim.Adam, foreach=True), adam),
    "Adam, fused": (partial(optim.Adam, fused=True), adam),
    "Adam, maximize": (partial(optim.Adam, maximize=True), adam),
    "Adam, decay": (partial(optim.AdamW, betas=(0.9, 0.8)), partial(adam, beta2=0.8)),
    "AdamW, amsgrad": (partial(optim.AdamW, amsgrad=True, betas=(0.9, 0.5)), amsgrad),
    "NAdam": (optim.NAdam, adam),
    "RAdam": (optim.RAdam, adam),
    "Adamax": (optim.Adamax, adamax),
    "SGD": (
        partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False), momentum
    ),
    "SGD, fused": (partial(optim.SGD, lr=0.1, momentum=0.9, fused=True), momentum),
    "SGD, foreach": (
        partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True, maximize=True), momentum
    ),
    "RMSprop": (partial(optim.RMSprop, momentum=0.5), rmsprop),
    "RMSprop, centered": (
        partial(optim.RMSprop, centered=True), partial(rmsprop, centered=True)
    ),
    "Adadelta": (optim.Adadelta, adadelta),
    "Adagrad": (optim.Adagrad, adagrad),
    "Adagrad, fused": (partial(optim.Adagrad, fused=True), adagrad),
    "Adafactor": (optim.Adafactor, adafactor),
    "Adafactor, foreach": (partial(optim.Adafactor, foreach=True), adafactor),
}  # fmt: skip


def expected(averages: Averages, gradient: Tensor) -> dict[str, float]:
    found = {}
    if averages.first is not None:
        found["m"] = averages.first.norm().item()
        product = (averages.first * gradient).sum()
        found["cosine"] = (product / averages.first.norm() / gradient.norm()).item()
    if averages.root is not None:
        quotient = gradient / averages.root.clamp(min=averages.floor)
        found["root_v"] = averages.root.norm().item()
        found["rms"] = quotient.square().mean().sqrt().item()
    return found


@dataclass
class Trained:
    history: History
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each step, as the optimizer takes them, in float64."""
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    """Before each update, and after the last one."""


def train(
    make: Callable[..., Optimizer],
    network: Callable[[], nn.Module] = mlp,
    tracked: Sequence[Quantity] | None = None,
    parts: int = 1,
    clip: float | None = 0.1,
    dtype: torch.dtype = torch.float64,
    autocast: bool = False,
) -> Trained:
    torch.manual_seed(0)
    model = network().to(dtype)
    optimizer = make(model.parameters())
    default = [OptimizerState(), RelativeUpdate(), ClippedGradNorm(), GradNorm()]
    cockpit = Cockpit(model, default if tracked is None else tracked, strict=True)
    found = Trained(cockpit.history)
    copied = lambda of: {n: of(p).detach().double().clone() for n, p in model.named_parameters()}  # noqa: E731
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = torch.randn(8, 4, dtype=dtype), torch.randn(8, 2, dtype=dtype)
        both = zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
        for part, (x, y) in enumerate(both, 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = (model(x) - y).square().mean() / parts
            tracked_backward(cockpit, step, loss, optimizer=optimizer, accumulating=part < parts)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        found.gradients.append(copied(lambda p: p.grad))
        found.parameters.append(copied(lambda p: p))
        optimizer.step()
    found.parameters.append(copied(lambda p: p))
    cockpit.close()
    assert not cockpit.history.notes
    found.history = cockpit.history
    return found


def assert_state(found: Trained, recursion: Recursion, rtol: float) -> None:
    for step in range(STEPS):
        record = found.history["OptimizerState"][step]
        for name, value in record["parameters"].items():
            gradients = [each[name] for each in found.gradients[: step + 1]]
            wanted = expected(recursion(gradients), gradients[-1])
            assert value == pytest.approx(wanted, rel=rtol, abs=1e-12), (step, name)
        every = record["parameters"].values()
        if "cosine" in record:
            mean = sum(each["cosine"] for each in every) / len(every)
            assert record["cosine"] == pytest.approx(mean)
        if "largest_rms" in record:
            assert record["largest_rms"] == max(each["rms"] for each in every)


@pytest.mark.parametrize("case", CASES)
def test_state_of_each_optimizer(case: str) -> None:
    make, recursion = CASES[case]
    assert_state(train(make), recursion, 1e-8)


class Decaying(optim.SGD):
    """An optimizer of somebody's own that adds the weight decay to ``p.grad``."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.add_(each.detach(), alpha=0.1)
        return super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        partial(Decaying, lr=0.1, momentum=0.9),
    ],
    ids=["Nesterov's momentum, foreach", "decay"],
)
def test_gradients_that_the_optimizer_writes_into_are_not_the_gradient(
    make: Callable[..., Optimizer],
) -> None:
    found = train(make)
    for step in range(STEPS):
        for record in found.history["OptimizerState"][step]["parameters"].values():
            assert record["m"] > 0
            assert "foreach=False" in record["cosine"].reason


NETWORKS = {"residual": Residual, "recurrent": Recurrent, "attention": Attention}


@pytest.mark.parametrize("network", NETWORKS)
def test_state_on_networks(network: str) -> None:
    found = train(optim.AdamW, NETWORKS[network], [OptimizerState()])
    # Biases before a normalisation have gradients of rounding errors, whose size ε compares with.
    assert_state(found, adam, 1e-6)


def test_state_under_autocast_and_of_parameters_in_half_precision() -> None:
    assert_state(train(optim.AdamW, dtype=torch.float32, autocast=True), adam, 1e-4)
    half = train(optim.AdamW, dtype=torch.bfloat16, clip=None)
    values = half.history["OptimizerState"][0]["parameters"].values()
    assert [each["rms"] for each in values] == pytest.approx([1] * 4, rel=0.02)
    assert [each["cosine"] for each in values] == pytest.approx([1] * 4, rel=1e-4)


def test_micro_batches_have_the_values_of_the_whole_batch() -> None:
    whole, parts = train(optim.AdamW), train(optim.AdamW, parts=4)
    for name in ("OptimizerState", "RelativeUpdate", "ClippedGradNorm", "GradNorm"):
        for step in range(STEPS):
            assert_same_records(parts.history[name][step], whole.history[name][step], rtol=1e-7)


def test_parameters_in_pieces_have_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(optim.AdamW).history["OptimizerState"]
    monkeypatch.setattr("gradlens.quantities.moments.AT_ONCE", {"cpu": 3})
    pieces = train(optim.AdamW).history["OptimizerState"]
    for step in range(STEPS):
        assert_same_records(pieces[step], whole[step], rtol=1e-12)


@pytest.mark.parametrize("unit", [2.0**-45, 2.0**30], ids=["small", "large"])
def test_losses_of_any_size(unit: float) -> None:
    """Squares of gradients are in the range of float32 for v, and products with m are, too."""

    def scaled(unit: float) -> Mapping[str, Any]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = optim.Adam(model.parameters(), eps=0.0)
        history = loop(model, optimizer, [OptimizerState()], factor=unit)
        return parameters_of(history)

    usual = scaled(1.0)
    for name, found in scaled(unit).items():
        laws = {"m": unit, "root_v": unit, "cosine": 1.0, "rms": 1.0}
        expected = {entry: law * usual[name][entry] for entry, law in laws.items()}
        assert found == pytest.approx(expected, rel=1e-5, abs=0)


def test_waits_for_a_device_do_not_depend_on_the_number_of_parameters() -> None:
    def waits(layers: int) -> Counter[str]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).double()
        optimizer = optim.Adam(model.parameters(), fused=True)
        tracked = [OptimizerState(), RelativeUpdate(), ClippedGradNorm()]
        cockpit, device = Cockpit(model, tracked, facts=False, strict=True), SimulatedDevice()
        for step in range(3):
            optimizer.zero_grad()
            before = Counter(device.waits)
            loss = model(torch.randn(5, 4).double()).square().mean()
            with device, cockpit(step, loss=loss, optimizer=optimizer):
                loss.backward()
            with device:
                optimizer.step()
        cockpit.close()
        assert not device.errors
        return device.waits - before

    few, many = waits(2), waits(6)
    assert few == many
    assert few.total() <= 4, few  # behind the backward pass, before and after the optimizer, update


@pytest.mark.parametrize("case", ["Adam", "SGD", "Adafactor"])
def test_relative_update(case: str) -> None:
    found = train(CASES[case][0], Residual)
    for step in range(STEPS):
        start, end = found.parameters[step : step + 2]
        moved = {name: end[name] - start[name] for name in start}
        record = found.history["RelativeUpdate"][step]
        for name, value in record["parameters"].items():
            rms = moved[name].square().mean().sqrt().item()
            assert value["rms"] == pytest.approx(rms, rel=1e-9)
            if start[name].any():
                ratio = moved[name].norm() / start[name].norm()
                assert value["value"] == pytest.approx(ratio.item(), rel=1e-9)
            else:  # the biases of normalisations
                assert value["value"].reason == "the parameter is zero before the update"
        both = [torch.cat([p.flatten() for p in each.values()]) for each in (moved, start)]
        assert record["value"] == pytest.approx((both[0].norm() / both[1].norm()).item(), rel=1e-9)
        assert record["rms"] == pytest.approx(both[0].square().mean().sqrt().item(), rel=1e-9)


def test_relative_update_of_zeros_and_of_what_is_selected() -> None:
    def zeros() -> nn.Module:
        model = mlp()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model

    tracked = [RelativeUpdate(), RelativeUpdate(parameters="bias", name="of biases")]
    history = train(partial(optim.SGD, lr=0.1), zeros, tracked).history
    first = history["RelativeUpdate"][0]
    assert first["value"].reason == "the parameters are zero before the update"
    assert first["parameters"]["2.bias"]["rms"] > 0
    biases = history["of biases"][1]["parameters"]
    assert set(biases) == {"0.bias", "2.bias"}
    assert history["of biases"][1]["value"] == biases["2.bias"]["value"]  # the other has no update


def test_clipped_norm_is_that_of_what_the_optimizer_takes() -> None:
    found = train(optim.SGD, clip=0.1)
    for step, record in found.history["ClippedGradNorm"].items():
        norms = {name: g.norm().item() for name, g in found.gradients[step].items()}
        assert record == pytest.approx(norms, rel=1e-9)
        assert math.hypot(*record.values()) == pytest.approx(0.1, rel=1e-4)
        assert math.hypot(*found.history["GradNorm"][step].values()) > 0.1
    for clip in (None, 1e3):  # a limit that isn't reached multiplies gradients by one
        values = train(optim.SGD, clip=clip).history["ClippedGradNorm"]
        assert all("not clipped" in values[step].reason for step in range(STEPS))


# Loops of other kinds ---------------------------------------------------------------------------


class Normalising(optim.SGD):
    """Changes the gradients in place, as NovoGrad does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        super().step(closure)


def halve(groups: Sequence[Mapping[str, Any]], step: Callable[[], Any]) -> None:
    """Go back half of what a step does, as Lookahead does."""
    parameters = [p for group in groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    step()
    with torch.no_grad():
        for parameter, start in zip(parameters, before, strict=True):
            parameter.lerp_(start, 0.5)


class Halving(optim.SGD):
    def step(self, closure: Any = None) -> None:
        halve(self.param_groups, super().step)


class Around(Optimizer):
    """Has another optimizer, and no hooks."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = optim.SGD(parameters, lr=0.1)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        halve(self.param_groups, self.optimizer.step)


class AroundWithHooks(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.optimizer = optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        halve(self.param_groups, self.optimizer.step)


OF_OTHERS: dict[str, Callable[..., Optimizer]] = {
    "its gradients": partial(Normalising, lr=0.1),
    "a step of its base class": partial(Halving, lr=0.1),
    "a wrapper": Around,
    "a wrapper with hooks": AroundWithHooks,
}


@pytest.mark.parametrize("case", OF_OTHERS)
def test_optimizers_that_change_more_than_a_step_does(case: str) -> None:
    tracked = [ClippedGradNorm(), RelativeUpdate(), UpdateSize()]
    found = train(OF_OTHERS[case], tracked=tracked)
    for step in range(STEPS):
        start, end = found.parameters[step : step + 2]
        lengths = {n: float((end[n] - p).norm()) for n, p in start.items()}
        assert found.history["UpdateSize"][step] == pytest.approx(lengths)
        for name, record in found.history["RelativeUpdate"][step]["parameters"].items():
            assert record["value"] == pytest.approx(lengths[name] / float(start[name].norm()))
        clipped = found.history["ClippedGradNorm"][step]
        if case == "a wrapper":
            assert "wasn't seen" in clipped.reason
        else:
            norms = {n: float(g.norm()) for n, g in found.gradients[step].items()}
            assert clipped == pytest.approx(norms)


def loop(
    model: nn.Module,
    optimizer: Optimizer,
    tracked: Sequence[Quantity],
    change: Callable[[int], None] = lambda step: None,
    steps: int = 2,
    others: Sequence[Optimizer] = (),
    factor: float = 1.0,
) -> History:
    """Training, with a ``change`` between the backward pass and the optimizer's step."""
    cockpit = Cockpit(model, tracked)
    for step in range(steps):
        model.zero_grad()
        loss = factor * model(torch.randn(6, 4)).square().mean()
        tracked_backward(cockpit, step, loss, optimizer=optimizer)
        change(step)
        optimizer.step()
        for other in others:
            other.step()
    cockpit.close()
    return cockpit.history


def parameters_of(history: History, step: int = 1) -> Mapping[str, Any]:
    return history["OptimizerState"][step]["parameters"]


def test_one_of_two_optimizers() -> None:
    """Muon takes matrices alone, and is seen although others update the rest."""
    torch.manual_seed(0)
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    muon, other = optim.Muon(matrices), optim.AdamW(rest)
    seen: list[Tensor] = []
    tracked = [OptimizerState(), UpdateSize()]
    history = loop(
        model, muon, tracked, change=lambda step: seen.append(matrices[0].grad.double()),
        others=[other],
    )  # fmt: skip
    first = averaged(seen, 0.95)
    found = parameters_of(history)
    wanted = expected(Averages(first), seen[-1])
    assert found["0.weight"] == pytest.approx(wanted, rel=1e-5)
    assert "the optimizer that was passed doesn't have it" in found["0.bias"].reason
    assert history["UpdateSize"][1]["0.bias"] > 0


def test_sparse_gradients() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 2, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(torch.tensor([1, 3, 3]))

    model = Words()
    optimizer = optim.SparseAdam(model.parameters())
    history = loop(model, optimizer, [OptimizerState()], steps=1)
    found = parameters_of(history, 0)["table.weight"]
    assert found["cosine"] == pytest.approx(1)
    assert found["rms"] == pytest.approx(math.sqrt(2 / 5))  # two rows of five have gradients


def test_complex_parameters_are_pairs_of_real_ones() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x * self.factor)

    torch.manual_seed(0)
    model = Turned()
    history = loop(model, optim.Adam(model.parameters()), [OptimizerState()], steps=1)
    found = parameters_of(history, 0)["factor"]
    assert found["cosine"] == pytest.approx(1)
    assert found["rms"] == pytest.approx(math.sqrt(2), rel=1e-5)  # both parts of an element are one


BAD: dict[str, tuple[Callable[[nn.Module], Optimizer], str]] = {
    "no momentum": (lambda m: optim.SGD(m.parameters(), lr=0.1), "has no momentum"),
    "no averages": (lambda m: optim.Rprop(m.parameters()), "a Rprop keeps"),
    "of another": (lambda m: optim.Adam(m[2].parameters()), "doesn't have it"),
}


@pytest.mark.parametrize("case", BAD)
def test_optimizers_without_such_state(case: str) -> None:
    make, reason = BAD[case]
    model = mlp()
    history = loop(model, make(model), [OptimizerState()])
    assert reason in parameters_of(history)["0.weight"].reason


class Lion(Optimizer):
    """An optimizer that isn't torch's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["average"] = 3 * parameter.grad


def test_optimizers_of_others_are_added_by_readers() -> None:
    model = mlp()
    history = loop(model, Lion(model.parameters()), [OptimizerState(), GradNorm()])
    assert "readers={Lion: ...}" in parameters_of(history)["0.bias"].reason
    reads = OptimizerState(readers={Lion: lambda state, group: Moments(state["average"])})
    history = loop(model, Lion(model.parameters()), [reads, GradNorm()])
    found = parameters_of(history)["0.bias"]
    assert found["m"] == pytest.approx(3 * history["GradNorm"][1]["0.bias"], rel=1e-6)
    assert found["cosine"] == pytest.approx(1)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_parameters_without_state_or_gradients() -> None:
    model = Unused()

    def freeze(step: int) -> None:
        if step == 1:
            model.used.bias.grad = None

    history = loop(model, optim.Adam(model.parameters()), [OptimizerState()], change=freeze)
    found = parameters_of(history)
    assert "hasn't updated it yet" in found["unused.weight"].reason
    assert "no elements" in found["nothing"].reason
    assert found["used.bias"]["m"] > 0
    assert "no gradient" in found["used.bias"]["cosine"].reason
    assert "no gradient" in found["used.bias"]["rms"].reason
    assert history["OptimizerState"][1]["largest_rms"] == found["used.weight"]["rms"]


def test_zeros_and_numbers_that_are_not_finite() -> None:
    def spoil(step: int) -> None:
        first, bias, *_ = model.parameters()
        first.grad[0] = math.nan
        bias.grad.zero_()

    model = mlp()
    history = loop(model, optim.Adam(model.parameters()), [OptimizerState()], change=spoil, steps=1)
    found = parameters_of(history, 0)
    assert "NaN or Inf" in found["0.weight"]["m"].reason
    assert "NaN or Inf" in found["0.weight"]["cosine"].reason
    assert "NaN or Inf" in found["0.weight"]["rms"].reason
    assert found["0.bias"]["cosine"].reason == "the gradient is zero"
    assert found["0.bias"]["m"] == found["0.bias"]["rms"] == 0


def test_steps_that_are_not_seen() -> None:
    model = mlp()
    optimizer = optim.Adam(model.parameters())
    tracked = [OptimizerState(), ClippedGradNorm(), RelativeUpdate()]
    cockpit = Cockpit(model, tracked)
    for step in range(2):
        optimizer.zero_grad()
        with cockpit(step, optimizer=optimizer):
            model(torch.randn(6, 4)).square().mean().backward()
            if step == 0:
                optimizer.step()
    cockpit.close()
    for name in ("OptimizerState", "ClippedGradNorm"):
        assert all("wasn't seen" in each.reason for each in cockpit.history[name].values())
    inside, none = (cockpit.history["RelativeUpdate"][step] for step in range(2))
    assert inside["value"] > 0
    assert none["value"] == none["rms"] == 0


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scalers(fused: bool) -> None:
    """A fused optimizer divides gradients itself, and leaves out a step with Inf on its own."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = optim.Adam(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    tracked = [OptimizerState(), ClippedGradNorm(), GradNorm()]
    cockpit = Cockpit(model, tracked)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        with cockpit(step, loss=loss, optimizer=optimizer, scaler=scaler):
            scaler.scale(loss).backward()
        if step == 1:
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    cockpit.close()
    history = cockpit.history
    assert all("not clipped" in history["ClippedGradNorm"][step].reason for step in (0, 2))
    for name in ("OptimizerState", "ClippedGradNorm"):
        assert "a gradient scaler has left it out" in history[name][1].reason
    for name, found in parameters_of(history, 0).items():
        assert found["rms"] == pytest.approx(1, rel=1e-4)
        assert found["m"] == pytest.approx(history["GradNorm"][0][name], rel=1e-5)
