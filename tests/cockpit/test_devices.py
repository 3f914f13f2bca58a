"""Tracked steps on a device that is simulated on the CPU."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradlens
from gradlens.history.history import History
from tests.cases.simulated_device import SimulatedDevice


def perceptron(layers: int) -> nn.Module:
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(10, 10), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(10, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 5)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inside(x.unflatten(1, (5, 2)))[0][:, -1])


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": partial(perceptron, 3),
    "convolutions": convolutions,
    "recurrent": Recurrent,
}


@pytest.fixture(autouse=True)
def _random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device has the random numbers of the CPU."""
    for module in (torch.cpu, torch.cuda):
        monkeypatch.setattr(module, "get_rng_state", lambda _: torch.get_rng_state(), raising=False)
        monkeypatch.setattr(
            module, "set_rng_state", lambda state, _: torch.set_rng_state(state), raising=False
        )


def tracked(
    model: nn.Module, preset: str, steps: int, device: AbstractContextManager[Any] | None = None
) -> tuple[History, Counter[str]]:
    """The history of a training, and where the last of its steps has waited for a device."""
    torch.manual_seed(0)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    quantities = gradlens.configuration(preset) if preset else []
    # Facts are read once in several steps.
    cockpit = gradlens.Cockpit(model, quantities, loss_function=loss_function, facts=False)
    place, waits = device or nullcontext(), Counter[str]()
    for step in range(steps):
        optimizer.zero_grad()
        outputs = model(torch.randn(12, 10, dtype=torch.float64))
        loss = loss_function(outputs, torch.randint(3, (12,)))
        before = Counter(device.waits) if isinstance(device, SimulatedDevice) else waits
        with place, cockpit(step, loss=loss, optimizer=optimizer, info={"outputs": outputs}):
            loss.backward()
        with place:
            optimizer.step()
        if isinstance(device, SimulatedDevice):
            waits = device.waits - before
    with place:
        cockpit.close()
    return cockpit.history, waits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlens, step")
@pytest.mark.parametrize(("preset", "most"), [("", 2), ("economy", 4), ("business", 9)])
def test_waits_do_not_depend_on_the_number_of_parameters(preset: str, most: int) -> None:
    """Each wait takes as long as several operations. Steps 1, 2, 4, ... are labelled anew."""
    few, many = (
        tracked(perceptron(layers).double(), preset, 6, SimulatedDevice())[1] for layers in (3, 7)
    )
    assert few == many
    assert few.total() <= most, few


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlens, step")
@pytest.mark.parametrize("network", NETWORKS)
def test_values_of_a_device_are_those_of_the_host(network: str) -> None:
    """And tensors of both are never mixed, as no real device would permit."""
    model = NETWORKS[network]().double()
    device = SimulatedDevice()
    expected = tracked(copy.deepcopy(model), "full", 5)[0]
    found = tracked(model, "full", 5, device)[0]
    assert not device.errors
    assert [note.text for note in found.notes] == [note.text for note in expected.notes]
    for name in set(expected.names) - {"Time"}:
        for step, value in expected[name].items():
            assert_close(found[name][step], value)


def assert_close(found: Any, expected: Any) -> None:
    """Equal counts, and numbers that are equal but for rounding, wherever they are."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, str):
        assert found == expected
    elif isinstance(expected, np.ndarray) and expected.dtype.kind == "i":
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)
