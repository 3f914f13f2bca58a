"""Networks of the zoo: per-sample gradients are right or refused, and training is the same."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import gradlens
from benchmarks.zoo import tracked
from benchmarks.zoo.check import check
from tests.cases.whole_networks import BY_HAND, FAMILIES, GENERATED, is_refused

NETWORK = GENERATED["entry: frames"]
NETWORKS = BY_HAND | GENERATED


@pytest.mark.filterwarnings("ignore")  # torch's own, such as of nested tensors
@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_are_those_of_single_samples(name: str) -> None:
    """Against one backward pass for each sample; what is refused has a reason."""
    row = check(BY_HAND[name], "train", steps=2)
    assert not row.error
    assert not row.is_wrong, (row.worst, row.deviation)
    assert {*row.found} <= {BY_HAND[name].samples, None}
    assert (row.coverage < 100) == is_refused(name), row.reasons
    assert (row.coverage < 100) == bool(row.reasons)
    assert all(len(reason) > 20 for reason in row.reasons)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_a_library_of_models(name: str) -> None:
    row = check(FAMILIES[name].network(), "train", steps=1)
    assert row.is_full, (row.worst, row.deviation, row.reasons, row.error)


def draw(cockpit: gradlens.Cockpit) -> None:
    torch.rand(())


def change_parameters(cockpit: gradlens.Cockpit) -> None:
    for parameter in cockpit.parameters.values():
        parameter.data.mul_(1 + 1e-15)


def change_gradients(cockpit: gradlens.Cockpit) -> None:
    for parameter in cockpit.parameters.values():
        parameter.register_hook(lambda gradient: gradient * (1 + 1e-15))


def leave_a_hook(cockpit: gradlens.Cockpit) -> None:
    assert cockpit.model is not None
    cockpit.model.register_forward_hook(lambda *arguments: None)


def leave_an_attribute(cockpit: gradlens.Cockpit) -> None:
    assert cockpit.model is not None
    cockpit.model.left = True


def fail(cockpit: gradlens.Cockpit) -> None:
    raise AttributeError("for a test")


def record_nan(cockpit: gradlens.Cockpit) -> None:
    cockpit.history.append(0, {"Alpha": float("nan")})


FAULTS: dict[Callable[[gradlens.Cockpit], None], str] = {
    draw: "random numbers is",
    change_parameters: "gradient .* is",
    change_gradients: "gradient .* is",
    leave_a_hook: "left: .*_forward_hooks is",
    leave_an_attribute: "left: .*attribute left is",
    fail: "AttributeError: for a test",
    record_nan: "NaN without a reason in Alpha",
}
"""What a cockpit does at each step, and the problem that it is."""


def test_a_network_trains_the_same() -> None:
    row = tracked.track(NETWORK, "train", "economy")
    assert not row.problems
    assert row.quantities == row.tracked


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*NETWORKS][::12])
def test_networks_train_the_same(name: str) -> None:
    """Whether or not they are refused, with the plans that are kept from step to step."""
    assert not tracked.track(NETWORKS[name], "train", "economy").problems


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(
    fault: Callable[[gradlens.Cockpit], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = gradlens.Cockpit.__call__

    def faulty(cockpit: gradlens.Cockpit, *arguments: object, **named: object) -> object:
        fault(cockpit)
        return enter(cockpit, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(gradlens.Cockpit, "__call__", faulty)
    problems = tracked.track(NETWORK, "train", "economy").problems
    assert any(re.search(FAULTS[fault], each) for each in problems), problems
