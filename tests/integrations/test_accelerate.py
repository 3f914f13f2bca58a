"""A loop with Accelerate: what it has prepared is handed over as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens.quantities import Alpha, GradNorm, HessMaxEV, Loss, NormTest, Quantity, UpdateSize
from tests.cases.records import assert_same_records

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


def trained(
    parts: int, track: bool = True, plain: bool = False, **options: Any
) -> tuple[nn.Module, gradlens.Cockpit | None]:
    """By Accelerate, or by a plain loop."""
    model, loss_function = network(), nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    if not plain:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts, **options)
        model, optimizer = accelerator.prepare(model, optimizer)
    kinds, cockpit = QUANTITIES if parts == 1 else QUANTITIES[:-1], None
    if track:
        cockpit = gradlens.Cockpit(model, [kind() for kind in kinds], loss_function=loss_function)
    for number, (x, y) in enumerate(batches(parts)):
        with nullcontext() if plain else accelerator.accumulate(model):
            loss = loss_function(model(x), y)
            known = {"loss": loss, "optimizer": optimizer}
            known["accumulating"] = not (plain or accelerator.sync_gradients)
            with nullcontext() if cockpit is None else cockpit(number // parts, **known):
                loss.backward() if plain else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if cockpit is not None:
        cockpit.close()
    return model if plain else accelerator.unwrap_model(model), cockpit


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_values_are_those_of_a_plain_loop(parts: int) -> None:
    expected, found = (trained(*each)[1].history for each in ((1, True, True), (parts,)))
    assert not found.notes
    assert {*found.names} >= {"Loss", "GradNorm", "NormTest", "UpdateSize", "Alpha"}
    for name in found.names:
        assert_same_records(found[name], expected[name], 2e-3)


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}], ids=["float32", "bf16"])
@pytest.mark.parametrize("parts", [1, 2])
def test_training_is_the_same(parts: int, options: dict[str, Any]) -> None:
    model, cockpit = trained(parts, track=True, **options)
    other, _ = trained(parts, track=False, **options)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert all(value > 0 for value in cockpit.history["NormTest"].values())
