"""A loop with Accelerate: what it has prepared is handed over as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens.quantities import Alpha, GradNorm, HessMaxEV, Loss, NormTest, Quantity, UpdateSize

pytestmark = pytest.mark.slow

QUANTITIES: tuple[type[Quantity], ...] = (Loss, GradNorm, NormTest, UpdateSize, Alpha, HessMaxEV)


@pytest.fixture(autouse=True)
def _no_shared_state() -> Iterator[None]:
    """Accelerators of a process share their settings."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(parts: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    inputs, labels = torch.randn(3, 8, 4), torch.randint(3, (3, 8))
    return [
        (x, y)
        for xs, ys in zip(inputs, labels, strict=True)
        for x, y in zip(xs.chunk(parts), ys.chunk(parts), strict=True)
    ]


def trained(parts: int, track: bool, **options: Any) -> tuple[nn.Module, gradlens.Cockpit | None]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts, **options)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    loss_function = nn.CrossEntropyLoss()
    kinds = QUANTITIES if parts == 1 else QUANTITIES[:-1]
    cockpit = (
        gradlens.Cockpit(model, [kind() for kind in kinds], loss_function=loss_function)
        if track
        else None
    )
    for number, (x, y) in enumerate(batches(parts)):
        with accelerator.accumulate(model):
            loss = loss_function(model(x), y)
            if cockpit is None:
                accelerator.backward(loss)
            else:
                accumulating = not accelerator.sync_gradients
                step = number // parts
                with cockpit(step, loss=loss, optimizer=optimizer, accumulating=accumulating):
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if cockpit is not None:
        cockpit.close()
    return accelerator.unwrap_model(model), cockpit


def plain() -> gradlens.Cockpit:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_function = nn.CrossEntropyLoss()
    cockpit = gradlens.Cockpit(model, [kind() for kind in QUANTITIES], loss_function=loss_function)
    for step, (x, y) in enumerate(batches(1)):
        loss = loss_function(model(x), y)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    cockpit.close()
    return cockpit


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_values_are_those_of_a_plain_loop(parts: int) -> None:
    expected = plain().history
    _, cockpit = trained(parts, track=True)
    found = cockpit.history
    assert not found.notes
    assert {*found.names} >= {"Loss", "GradNorm", "NormTest", "UpdateSize", "Alpha"}
    for name in found.names:
        assert [*found[name]] == [*expected[name]]
        for step, value in expected[name].items():
            assert found[name][step] == pytest.approx(value, rel=2e-3), name


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}], ids=["float32", "bf16"])
@pytest.mark.parametrize("parts", [1, 2])
def test_training_is_the_same(parts: int, options: dict[str, Any]) -> None:
    model, cockpit = trained(parts, track=True, **options)
    other, _ = trained(parts, track=False, **options)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert all(value > 0 for value in cockpit.history["NormTest"].values())
