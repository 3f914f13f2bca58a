"""Tracked steps on a device that is simulated on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import gradlens
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
    """What the module of a device has, and that of the CPU hasn't."""
    monkeypatch.setattr(torch.cpu, "get_rng_state", lambda _: torch.get_rng_state(), raising=False)
    monkeypatch.setattr(
        torch.cpu, "set_rng_state", lambda state, _: torch.set_rng_state(state), raising=False
    )


def last_step(model: nn.Module, preset: str, steps: int) -> tuple[SimulatedDevice, list[str]]:
    """The device after the last step, whose waits alone are counted, and the notes of the run."""
    torch.manual_seed(0)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    tracked = gradlens.configuration(preset) if preset else []
    # Facts are read once in several steps.
    cockpit = gradlens.Cockpit(model, tracked, loss_function=loss_function, facts=False)
    device = SimulatedDevice()
    for step in range(steps):
        device.waits.clear()
        optimizer.zero_grad()
        outputs = model(torch.randn(12, 10))
        loss = loss_function(outputs, torch.randint(3, (12,)))
        info = {"outputs": outputs}
        with device, cockpit(step, loss=loss, optimizer=optimizer, info=info):
            loss.backward()
        optimizer.step()
    cockpit.close()
    return device, [note.text for note in cockpit.history.notes]


@pytest.mark.filterwarnings("ignore:gradlens, step")
@pytest.mark.parametrize(("preset", "most"), [("", 2), ("economy", 20), ("business", 31)])
def test_waits_do_not_depend_on_the_number_of_parameters(preset: str, most: int) -> None:
    """Each wait takes as long as several operations. Steps 1, 2, 4, ... are labelled anew."""
    few, many = (last_step(perceptron(layers), preset, 6)[0].waits for layers in (3, 7))
    assert few == many
    assert few.total() <= most, few


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradlens, step")
@pytest.mark.parametrize("network", NETWORKS)
def test_tensors_of_the_device_and_of_the_host_are_not_mixed(network: str) -> None:
    device, notes = last_step(NETWORKS[network](), "full", 5)
    assert not device.errors
    assert not [note for note in notes if "Error" in note]
