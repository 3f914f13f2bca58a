"""Quantities that span the optimizer's step, against references that store everything."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from gradlens import Cockpit, quantities
from tests.cases.networks import NETWORKS
from tests.cases.references import flat, per_sample_gradients_by_loop, squared_error
from tests.cases.steps import tracked_backward

STEPS, SAMPLES = 4, 6


@dataclass
class Record:
    """One step of the reference run: everything, dense and in float64."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: Tensor


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first], "lr": 0.3}, {"params": rest, "weight_decay": 0.1}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Nesterov, decay": lambda model: SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "maximize": lambda model: SGD(model.parameters(), lr=0.01, maximize=True),
    "groups": lambda model: SGD(groups(model), lr=0.1),
    "Adam": lambda model: Adam(model.parameters(), lr=0.01),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run(
    network: str,
    reduction: str,
    optimizer: str,
    tracked: list[Any],
    clip: float | None = None,
    tell_optimizer: bool = True,
) -> tuple[Cockpit, list[Record]]:
    torch.manual_seed(0)
    model = NETWORKS[network].build().double()
    opt = OPTIMIZERS[optimizer](model)
    cockpit = Cockpit(model, tracked, loss_reduction=reduction)
    scale = SAMPLES if reduction == "mean" else 1
    records = []
    for step in range(STEPS):
        inputs = NETWORKS[network].inputs(SAMPLES)
        with torch.no_grad():
            target = torch.randn_like(model(inputs))
        contribution = squared_error(target, reduction)
        output = model(inputs)
        losses = (output - target).square().flatten(1).mean(1)
        opt.zero_grad()
        before = state(model)
        gradients = per_sample_gradients_by_loop(model, inputs, contribution, scale)
        loss = contribution(output, slice(None))
        info = {"individual_losses": losses.detach()}
        tracked_backward(cockpit, step, loss, optimizer=opt if tell_optimizer else None, info=info)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        records.append(Record(before, state(model), gradients, losses.detach()))
    cockpit.close()
    return cockpit, records


def alpha(start: Record, end: Record) -> float:
    """The fit's normal equations as in the paper, in NumPy."""
    d = torch.cat([(start.after[n] - start.before[n]).flatten() for n in start.before]).numpy()
    t = np.linalg.norm(d)
    slopes = [flat(record.gradients).numpy() @ d / t for record in (start, end)]
    losses = [record.losses.numpy() for record in (start, end)]
    y = np.array([v.mean() for v in (*losses, *slopes)])
    inverse = np.diag([1 / v.var(ddof=1) for v in (*losses, *slopes)])
    phi = np.array([[1, 0, 0], [1, t, t**2], [0, 1, 0], [0, 1, 2 * t]]).T
    mu = np.linalg.solve(phi @ inverse @ phi.T, phi @ inverse @ y)
    return 2 * t / (-mu[1] / mu[2]) - 1 if mu[2] > 0 else math.nan


@pytest.mark.parametrize("tell_optimizer", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("clip", [None, 0.01], ids=["", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("network", "reduction"), [("mlp", "mean"), ("conv2d", "sum")])
def test_alpha_update_size_and_distance(
    network: str, reduction: str, optimizer: str, clip: float | None, tell_optimizer: bool
) -> None:
    tracked = [quantities.Alpha(), quantities.UpdateSize(), quantities.Distance()]
    cockpit, records = run(network, reduction, optimizer, tracked, clip, tell_optimizer)
    history = cockpit.history
    for step, record in enumerate(records):
        for name, before in record.before.items():
            assert history["UpdateSize"][step][name] == pytest.approx(
                (record.after[name] - before).norm().item(), rel=1e-9
            )
            assert history["Distance"][step][name] == pytest.approx(
                (before - records[0].before[name]).norm().item(), rel=1e-9, abs=1e-15
            )
    assert list(history["UpdateSize"]) == list(range(STEPS))  # the last one included
    assert list(history["Alpha"]) == list(range(STEPS - 1))
    for step, (start, end) in enumerate(pairwise(records)):
        expected = alpha(start, end)
        assert history["Alpha"][step] == pytest.approx(expected, rel=1e-7, nan_ok=True)
        assert math.isnan(expected) == bool(getattr(history["Alpha"][step], "reason", ""))


@pytest.mark.parametrize("others", [[], [quantities.NormTest]], ids=["alone", "with another"])
@pytest.mark.parametrize("limit", ["STORED_BYTES", "RETAINED_BYTES", None])
@pytest.mark.parametrize("network", ["conv2d", "lstm", "prelu"])
def test_alpha_does_not_depend_on_what_is_stored(
    network: str,
    limit: str | None,
    others: list[type[quantities.Quantity]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if limit is not None:
        module = "reductions" if limit == "STORED_BYTES" else "gradients.reduce"
        monkeypatch.setattr(f"gradlens.{module}.{limit}", 0)
    cockpit, records = run(
        network, "mean", "SGD", [quantities.Alpha(), *(kind() for kind in others)]
    )
    for step, (start, end) in enumerate(pairwise(records)):
        expected = pytest.approx(alpha(start, end), rel=1e-7, nan_ok=True)
        assert cockpit.history["Alpha"][step] == expected


@pytest.mark.parametrize(
    ("kind", "optimizer", "problem"),
    [
        ("CABS", "Adam", "CABS is derived for plain SGD.*the optimizer is Adam"),
        ("CABS", "momentum", "CABS is derived for plain SGD.*uses momentum"),
        ("CABS", "maximize", "CABS is derived for plain SGD.*uses maximize"),
        ("CABS", "groups", "CABS is derived for plain SGD.*uses weight_decay"),
        ("EarlyStopping", "AdamW", "weight decay"),
    ],
)
def test_optimizers_that_quantities_are_not_derived_for(
    kind: str, optimizer: str, problem: str
) -> None:
    cockpit, _ = run("mlp", "mean", optimizer, [getattr(quantities, kind)()])
    assert re.search(problem, cockpit.history[kind][0].reason)


def test_alpha_of_tokens_is_that_of_the_losses_of_samples() -> None:
    """Losses of single tokens vary in another way than those of samples."""
    expected = alpha_of_tokens(flattened=False)
    assert math.isfinite(expected)
    assert alpha_of_tokens(flattened=True) == pytest.approx(expected, rel=1e-4)


def alpha_of_tokens(flattened: bool) -> float:
    torch.manual_seed(0)
    model, loss_function = nn.Linear(4, 3), nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model, [quantities.Alpha()], loss_function=loss_function)
    for step in range(2):
        optimizer.zero_grad()
        output, labels = model(torch.randn(6, 5, 4)), torch.randint(3, (6, 5))
        rows = (output.flatten(0, 1), labels.flatten())
        loss = loss_function(*(rows if flattened else (output.transpose(1, 2), labels)))
        with cockpit(step, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    return cockpit.history["Alpha"][0]


def test_steps_between_tracked_ones_make_alpha_undefined() -> None:
    assert "more than once" not in getattr(two_steps().history["Alpha"][0], "reason", "")
    assert "more than once" in two_steps(updates=2).history["Alpha"][0].reason


@torch.no_grad()
def decay(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


WAYS = [("", "step"), ("step", ""), ("", "decay step"), ("decay", "step")]
"""What is done in the context, behind the backward pass, and after it."""


def updated(
    inside: str, after: str, kind: Callable[..., Optimizer], passed: bool
) -> tuple[Cockpit, list[dict[str, Tensor]]]:
    """A run, and the parameters before each step and after the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    optimizer, loss_function = kind(model.parameters(), lr=0.1), nn.MSELoss()
    does = {"step": optimizer.step, "decay": partial(decay, model)}
    tracked = [quantities.Alpha(), quantities.UpdateSize()]
    cockpit, states = Cockpit(model, tracked, loss_function=loss_function), [state(model)]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_function(model(torch.randn(6, 4).double()), torch.randn(6, 3).double())
        with cockpit(step, loss=loss, optimizer=optimizer if passed else None):
            loss.backward()
            for name in inside.split():
                does[name]()
        for name in after.split():
            does[name]()
        states.append(state(model))
    cockpit.close()
    return cockpit, states


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("kind", [SGD, Adam, partial(Adam, fused=True)])
@pytest.mark.parametrize(("inside", "after"), WAYS)
def test_updates_begin_where_the_context_is_entered(
    inside: str, after: str, kind: Callable[..., Optimizer], passed: bool
) -> None:
    cockpit, states = updated(inside, after, kind, passed)
    for step, (before, end) in enumerate(pairwise(states)):
        sizes = {name: float((end[name] - before[name]).norm()) for name in before}
        assert cockpit.history["UpdateSize"][step] == pytest.approx(sizes, rel=1e-12)
    if inside == "step":
        expected = updated("", "step", kind, passed)[0].history["Alpha"]
        found = dict(cockpit.history["Alpha"])
        assert len(found) == STEPS - 1
        assert found == pytest.approx(dict(expected), rel=1e-9, nan_ok=True)


def test_a_wrapper_without_groups_is_refused() -> None:
    """What its step does beside that of its optimizer isn't known."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model, [quantities.UpdateSize()])
    with pytest.raises(TypeError, match="no param_groups: pass the instance"):
        cockpit(0, optimizer=Wrapper(optimizer))


def test_optimizer_that_was_never_stepped() -> None:
    history = two_steps(updates=0).history
    assert history["Alpha"][0].reason == "the update is zero"
    assert set(history["UpdateSize"][0].values()) == {0.0}


def two_steps(
    change: Callable[[nn.Sequential], None] = lambda model: None,
    between: Callable[[nn.Module], None] = lambda model: None,
    passes_optimizer: bool = True,
    updates: int = 1,
) -> Cockpit:
    """Of a network that is changed before the cockpit is made, and after each update."""
    torch.manual_seed(0)
    model, module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.MSELoss()
    change(model)
    tracked = [quantities.Alpha(), quantities.UpdateSize()]
    cockpit = Cockpit(model, tracked, loss_function=module, batchnorm="skip")
    for step in range(2):
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss = module(model(torch.randn(5, 3)), torch.randn(5, 2))
        info = {"optimizer": optimizer} if passes_optimizer else {}
        tracked_backward(cockpit, step, loss, info=info)
        for _ in range(updates):
            optimizer.step()
        between(model)
    cockpit.close()
    return cockpit


def alpha_of_two_steps(**options: Any) -> Any:
    return two_steps(**options).history["Alpha"][0]


def test_alpha_of_an_update_along_which_slopes_are_unknown() -> None:
    """The gradient of 0.bias is nothing but rounding errors, which may all be 0."""
    assert math.isfinite(alpha_of_two_steps())
    with pytest.warns(UserWarning, match="cover|couples"):
        found = alpha_of_two_steps(change=lambda model: model.insert(1, nn.BatchNorm1d(4)))
    assert "0.weight have moved" in found.reason
    with pytest.warns(UserWarning, match="not tracked"):
        found = alpha_of_two_steps(between=lambda model: model.append(nn.Linear(2, 2)))
    assert "3.bias, 3.weight have moved" in found.reason


def add_noise(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))


def halve_data(model: nn.Module) -> None:
    weight = model.get_parameter("2.weight")
    weight.data = weight.data * 0.5


def clip_data(model: nn.Module) -> None:
    model.get_parameter("2.weight").data.clamp_(-0.1, 0.1)


def swap_and_restore(model: nn.Module) -> None:
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    for parameter, data in zip(model.parameters(), kept, strict=True):
        parameter.data = data


BETWEEN: dict[str, tuple[Callable[[nn.Module], None], bool]] = {
    "nothing": (lambda model: None, False),
    "averages swapped in and out": (swap_and_restore, False),
    "noise": (add_noise, True),
    "other data": (halve_data, True),
    "clipped data": (clip_data, True),
    "new initial values": (lambda model: model.get_submodule("0").reset_parameters(), True),
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("passes_optimizer", [True, False])
def test_alpha_if_parameters_change_after_the_update(name: str, passes_optimizer: bool) -> None:
    """With the optimizer, its update ends elsewhere; without, the change is part of the update."""
    change, changes = BETWEEN[name]
    found = alpha_of_two_steps(between=change, passes_optimizer=passes_optimizer)
    if changes and passes_optimizer:
        assert "have changed between the optimizer's step and the next context" in found.reason
    else:
        assert "have changed" not in getattr(found, "reason", "")
