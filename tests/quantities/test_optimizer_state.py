"""The optimizer's state and the gradients that it takes, against recursions in float64."""

from __future__ import annotations

import math
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

    def state(self, step: int = 1) -> Mapping[str, Any]:
        return self.history["OptimizerState"][step]["parameters"]


def train(
    make: Callable[..., Optimizer],
    network: Callable[[], nn.Module] = mlp,
    tracked: Sequence[Quantity] | None = None,
    parts: int = 1,
    clip: float | None = 0.1,
    dtype: torch.dtype = torch.float64,
    autocast: bool = False,
    factor: float = 1.0,
    change: Callable[[int, nn.Module], None] = lambda step, model: None,
    strict: bool = True,
) -> Trained:
    """Training, with a ``change`` between the backward pass and the optimizer's step."""
    torch.manual_seed(0)
    model = network()
    model = model if dtype == torch.float32 else model.to(dtype)  # which complex numbers have, too
    optimizer = make(model.parameters())
    default = [OptimizerState(), RelativeUpdate(), ClippedGradNorm(), GradNorm(), UpdateSize()]
    cockpit = Cockpit(model, default if tracked is None else tracked, strict=strict)
    found = Trained(cockpit.history)

    def copied(of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        chosen = {n: tensor for n, p in model.named_parameters() if (tensor := of(p)) is not None}
        wide = {n: torch.promote_types(tensor.dtype, torch.float64) for n, tensor in chosen.items()}
        return {n: tensor.detach().to(wide[n], copy=True) for n, tensor in chosen.items()}

    for step in range(STEPS):
        model.zero_grad()
        inputs, targets = torch.randn(8, 4, dtype=dtype), torch.randn(8, 2, dtype=dtype)
        both = zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
        for part, (x, y) in enumerate(both, 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = factor * (model(x) - y).square().mean() / parts
            tracked_backward(cockpit, step, loss, optimizer=optimizer, accumulating=part < parts)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        change(step, model)
        found.gradients.append(copied(lambda p: p.grad))
        found.parameters.append(copied(lambda p: p))
        optimizer.step()
    found.parameters.append(copied(lambda p: p))
    cockpit.close()
    assert not (strict and cockpit.history.notes)
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


NETWORKS = {"residual": Residual, "recurrent": Recurrent, "attention": Attention}


@pytest.mark.parametrize("network", NETWORKS)
def test_state_on_networks(network: str) -> None:
    found = train(optim.AdamW, NETWORKS[network], [OptimizerState()])
    # Biases before a normalisation have gradients of rounding errors, whose size ε compares with.
    assert_state(found, adam, 1e-6)


def test_state_under_autocast_and_of_parameters_in_half_precision() -> None:
    assert_state(train(optim.AdamW, dtype=torch.float32, autocast=True), adam, 1e-4)
    half = train(optim.AdamW, dtype=torch.bfloat16, clip=None).state(0).values()
    assert [each["rms"] for each in half] == pytest.approx([1] * 4, rel=0.02)
    assert [each["cosine"] for each in half] == pytest.approx([1] * 4, rel=1e-4)


def test_micro_batches_and_parameters_in_pieces_have_the_values_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = train(optim.AdamW)
    monkeypatch.setattr("gradlens.quantities.moments.AT_ONCE", {"cpu": 3})
    parts = train(optim.AdamW, parts=4)
    for name in ("OptimizerState", "RelativeUpdate", "ClippedGradNorm", "GradNorm"):
        assert_same_records(parts.history[name], whole.history[name], rtol=1e-7)


@pytest.mark.parametrize("unit", [2.0**-45, 2.0**30], ids=["small", "large"])
def test_losses_of_any_size(unit: float) -> None:
    """Squares of gradients are in the range of float32 for v, and products with m are, too."""
    usual, scaled = (
        train(partial(optim.Adam, eps=0.0), clip=None, dtype=torch.float32, factor=each).state()
        for each in (1.0, unit)
    )
    laws = {"m": unit, "root_v": unit, "cosine": 1.0, "rms": 1.0}
    for name, found in scaled.items():
        expected = {entry: law * usual[name][entry] for entry, law in laws.items()}
        assert found == pytest.approx(expected, rel=1e-5, abs=0)


# Updates, and gradients that are clipped --------------------------------------------------------


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


UPDATES: dict[str, Callable[..., Optimizer]] = {
    **{case: CASES[case][0] for case in ("Adam", "SGD", "Adafactor")},
    "its gradients": partial(Normalising, lr=0.1),
    "a step of its base class": partial(Halving, lr=0.1),
    "a wrapper": Around,
    "a wrapper with hooks": AroundWithHooks,
}


@pytest.mark.parametrize("case", UPDATES)
def test_updates_and_clipped_gradients(case: str) -> None:
    """Also where an optimizer changes more than a step of its own does."""
    found = train(UPDATES[case], Residual, [ClippedGradNorm(), RelativeUpdate(), UpdateSize()])
    for step in range(STEPS):
        start, end = found.parameters[step : step + 2]
        moved = {name: end[name] - start[name] for name in start}
        lengths = {name: each.norm().item() for name, each in moved.items()}
        assert found.history["UpdateSize"][step] == pytest.approx(lengths, rel=1e-9)
        record = found.history["RelativeUpdate"][step]
        for name, value in record["parameters"].items():
            rms = moved[name].square().mean().sqrt().item()
            assert value["rms"] == pytest.approx(rms, rel=1e-9)
            if start[name].any():
                ratio = lengths[name] / start[name].norm().item()
                assert value["value"] == pytest.approx(ratio, rel=1e-9)
            else:  # the biases of normalisations
                assert value["value"].reason == "the parameter is zero before the update"
        both = [torch.cat([p.flatten() for p in each.values()]) for each in (moved, start)]
        assert record["value"] == pytest.approx((both[0].norm() / both[1].norm()).item(), rel=1e-9)
        assert record["rms"] == pytest.approx(both[0].square().mean().sqrt().item(), rel=1e-9)
        clipped = found.history["ClippedGradNorm"][step]
        if case == "a wrapper":
            assert "wasn't seen" in clipped.reason
        else:
            norms = {name: g.norm().item() for name, g in found.gradients[step].items()}
            assert clipped == pytest.approx(norms, rel=1e-9)
            assert math.hypot(*clipped.values()) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("clip", [None, 1e3])
def test_gradients_that_are_not_clipped(clip: float | None) -> None:
    """A limit that isn't reached multiplies gradients by one."""
    values = train(optim.SGD, clip=clip).history["ClippedGradNorm"].values()
    assert all("not clipped" in each.reason for each in values)


def zeros() -> nn.Module:
    model = mlp()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def test_relative_update_of_zeros_and_of_what_is_selected() -> None:
    tracked = [RelativeUpdate(), RelativeUpdate(parameters="bias", name="of biases")]
    history = train(partial(optim.SGD, lr=0.1), zeros, tracked).history
    first = history["RelativeUpdate"][0]
    assert first["value"].reason == "the parameters are zero before the update"
    assert first["parameters"]["2.bias"]["rms"] > 0
    biases = history["of biases"][1]["parameters"]
    assert set(biases) == {"0.bias", "2.bias"}
    assert history["of biases"][1]["value"] == biases["2.bias"]["value"]  # the other has no update


# Parameters and optimizers of other kinds -------------------------------------------------------


class Decaying(optim.SGD):
    """An optimizer of somebody's own that adds the weight decay to ``p.grad``."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.add_(each.detach(), alpha=0.1)
        return super().step(closure)


class Lion(Optimizer):
    """An optimizer that isn't torch's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["average"] = 3 * parameter.grad


class Odd(nn.Module):
    """Parameters of unusual kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)
        self.nothing = nn.Parameter(torch.zeros(0))
        self.factor = nn.Parameter(torch.randn(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.used(x) * self.factor).sum(-1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(torch.tensor([1, 3, 3, 1, 3, 3, 1, 1]))


def drop_bias(step: int, model: nn.Module) -> None:
    if step == 1:
        model.get_parameter("used.bias").grad = None


def spoil(step: int, model: nn.Module) -> None:
    first, bias, *_ = model.parameters()
    first.grad[0] = math.nan  # type: ignore[index]
    bias.grad.zero_()  # type: ignore[union-attr]


@dataclass(frozen=True)
class Odds:
    """What is trained how, and a number, a reason or the limits of one for entries of a step."""

    make: Callable[..., Optimizer]
    expected: Mapping[str, Any]
    network: Callable[[], nn.Module] = mlp
    change: Callable[[int, nn.Module], None] = lambda step, model: None
    step: int = 1
    readers: Any = None


WRITTEN = {f"{name} cosine": "foreach=False" for name in ("0.weight", "0.bias", "2.bias")}
SPOILT = {f"0.weight {entry}": "NaN or Inf" for entry in ("m", "cosine", "rms")}
ODD: dict[str, Odds] = {
    # Gradients that the optimizer writes into are not the gradient.
    "Nesterov, foreach": Odds(
        partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True), WRITTEN
    ),
    "decay": Odds(partial(Decaying, lr=0.1, momentum=0.9), WRITTEN),
    "no momentum": Odds(partial(optim.SGD, lr=0.1), {"0.weight": "has no momentum"}),
    "no averages": Odds(optim.Rprop, {"0.weight": "a Rprop keeps"}),
    "of another": Odds(
        lambda given: optim.Adam([*given][2:]), {"0.weight": "doesn't have it", "2.bias rms": ...}
    ),
    "not torch's": Odds(Lion, {"0.bias": "readers={Lion: ...}"}),
    "not torch's, with a reader": Odds(
        Lion,
        {"0.bias m": 3.0, "0.bias cosine": 1.0},
        readers={Lion: lambda state, group: Moments(state["average"])},
    ),
    "odd parameters": Odds(
        optim.Adam,
        {
            "unused.weight": "hasn't updated it yet", "nothing": "no elements", "used.bias m": ...,
            "used.bias cosine": "no gradient", "used.bias rms": "no gradient",
        },
        Odd,
        drop_bias,
    ),
    # Both parts of a complex element are one element.
    "complex": Odds(optim.Adam, {"factor cosine": 1.0, "factor rms": 2**0.5}, Odd, step=0),
    # Two rows of five have gradients.
    "sparse": Odds(
        optim.SparseAdam, {"table.weight cosine": 1.0, "table.weight rms": 0.4**0.5}, Words, step=0
    ),
    "not finite or zero": Odds(
        optim.Adam,
        {**SPOILT, "0.bias cosine": "the gradient is zero", "0.bias m": 0.0, "0.bias rms": 0.0},
        change=spoil,
        step=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
@pytest.mark.filterwarnings("ignore:.*the loss doesn't depend on it")
def test_parameters_and_optimizers_of_other_kinds(case: str) -> None:
    odd = ODD[case]
    tracked = [OptimizerState(readers=odd.readers or {}), GradNorm()]
    dtype = torch.float32
    options: Any = {"clip": None, "dtype": dtype, "strict": False, "change": odd.change}
    found = train(odd.make, odd.network, tracked, **options)
    state = found.state(odd.step)
    for path, expected in odd.expected.items():
        name, _, entry = path.partition(" ")
        value = state[name][entry] if entry else state[name]
        if isinstance(expected, str):
            assert expected in value.reason
        elif expected is ...:
            assert value > 0
        else:
            unit = found.gradients[odd.step][name].norm().item() if entry == "m" else 1.0
            assert value == pytest.approx(expected * unit, rel=1e-4)
    if case == "odd parameters":
        largest = max(state[name]["rms"] for name in ("used.weight", "factor"))
        assert found.history["OptimizerState"][1]["largest_rms"] == largest


def test_one_of_two_optimizers() -> None:
    """Muon takes matrices alone, and is seen although others update the rest."""
    others: list[Optimizer] = []

    def muon(parameters: Any) -> Optimizer:
        given = [*parameters]
        others.append(optim.AdamW([p for p in given if p.dim() != 2]))
        return optim.Muon([p for p in given if p.dim() == 2])

    tracked = [OptimizerState(), UpdateSize()]
    found = train(muon, tracked=tracked, change=lambda step, model: others[0].step(), strict=False)
    seen = [each["0.weight"] for each in found.gradients[:2]]
    wanted = expected(Averages(averaged(seen, 0.95)), seen[-1])
    assert found.state()["0.weight"] == pytest.approx(wanted, rel=1e-5)
    assert "the optimizer that was passed doesn't have it" in found.state()["0.bias"].reason
    assert found.history["UpdateSize"][1]["0.bias"] > 0


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
    for name, found in history["OptimizerState"][0]["parameters"].items():
        assert found["rms"] == pytest.approx(1, rel=1e-4)
        assert found["m"] == pytest.approx(history["GradNorm"][0][name], rel=1e-5)
