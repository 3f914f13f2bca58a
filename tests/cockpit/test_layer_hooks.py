"""Layers have hooks in the forward passes of steps that may need them, and in no others."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pytest
import torch
from backpack.extensions import BatchGrad
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn

import gradlens
from gradlens.history.undefined import Undefined
from gradlens.quantities import (
    Alpha,
    HessMaxEV,
    HessTrace,
    Loss,
    NormTest,
    Quantity,
    SingleStepQuantity,
)
from gradlens.quantities.step import Step
from gradlens.schedules import linear
from tests.cases.references import per_sample_gradients_of_losses
from tests.graph.test_hooks import has_layer_hooks

JUMPING = (0, 1, 2, 3, 10, 11, 12, 20, 21)
"""Step 10 comes where 4 is expected."""


class BatchGradNorm(SingleStepQuantity):
    """Of an extension of BackPACK's own."""

    def extensions(self, global_step: int) -> list[BackpropExtension]:
        return [BatchGrad()] if self.should_compute(global_step) else []

    def compute(self, step: Step) -> float:
        parts: Iterable[Tensor] = (vars(p)["grad_batch"] for p in step.parameters.values())
        return sum(float(part.square().sum()) for part in parts)


class Run:
    """Trains, and records at which steps the layers had hooks."""

    def __init__(
        self, quantities: Sequence[Quantity], reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.loss_function = nn.CrossEntropyLoss(reduction=reduction)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.cockpit = gradlens.Cockpit(
            self.model, quantities, loss_reduction=reduction, loss_function=self.loss_function
        )
        self.inputs, self.labels = torch.randn(8, 5).double(), torch.arange(8) % 3
        self.steps_with_hooks: list[int] = []

    def step(self, step: int, *extensions: BackpropExtension, **known: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss()
        if has_layer_hooks(self.model):
            self.steps_with_hooks.append(step)
        with self.cockpit(step, *extensions, loss=loss, optimizer=self.optimizer, **known):
            loss.backward()
        self.optimizer.step()

    def loss(self) -> Tensor:
        found: Tensor = self.loss_function(self.model(self.inputs), self.labels)
        return found


def reference(make: Callable[[], Sequence[Quantity]], steps: Iterable[int]) -> gradlens.Cockpit:
    """The same run, whose layers have hooks all the time."""
    run = Run(make())
    gradlens.extend(run.model)
    for step in steps:
        run.step(step)
    return run.cockpit


def scalars(values: Iterable[Any]) -> list[float]:
    return [value["trace"] if isinstance(value, dict) else value for value in values]


@pytest.mark.filterwarnings("ignore:.*diag_h is estimated")
@pytest.mark.parametrize(
    ("quantity", "hooked"),
    [
        (NormTest, [0, 1]),
        (Alpha, [0, 1]),
        (HessTrace, [0, 1]),  # outputs are those of the loss function alone
        (BatchGradNorm, [0, 1, 5, 10]),
        (Loss, [0, 1]),
    ],
)
def test_hooks_are_installed_where_something_is_scheduled(
    quantity: type[Quantity], hooked: list[int]
) -> None:
    # What follows the first step can't be known.
    run = Run([quantity(linear(5)), Loss(name="another")])
    for step in range(12):
        run.step(step)
    assert run.steps_with_hooks == hooked
    expected = reference(lambda: [quantity(linear(5))], range(12)).history[quantity.__name__]
    found = run.cockpit.history[quantity.__name__]
    assert list(found) == list(expected)
    assert scalars(found.values()) == pytest.approx(scalars(expected.values()), rel=1e-12)


def test_an_unexpected_step_has_a_reason_and_later_ones_have_values() -> None:
    """Where an extension of BackPACK's needs the calls of layers."""
    run = Run([BatchGradNorm(linear(10))])
    for step in JUMPING:
        run.step(step)
    values = run.cockpit.history["BatchGradNorm"]
    missed = values[10]
    assert isinstance(missed, Undefined)
    assert "cockpit.forward(step)" in missed.reason
    assert run.steps_with_hooks == [0, 1, 11, 12, 20, 21]
    expected = reference(lambda: [BatchGradNorm(linear(10))], JUMPING).history["BatchGradNorm"]
    assert {0: values[0], 20: values[20]} == {0: expected[0], 20: expected[20]}


@pytest.mark.parametrize("known", [{}, {"batch_size": 8}], ids=["read off", "passed"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("quantity", [NormTest, HessMaxEV])
def test_the_graph_is_enough_where_there_were_no_hooks(
    quantity: type[Quantity], reduction: Literal["mean", "sum"], known: dict[str, int]
) -> None:
    """Per-sample gradients and the number of samples are the same at an unexpected step."""
    run, hooked = (Run([quantity(linear(10))], reduction) for _ in range(2))
    gradlens.extend(hooked.model)
    for step in JUMPING:
        run.step(step, **known)
        hooked.step(step)
    assert 10 not in run.steps_with_hooks
    values, expected = (dict(r.cockpit.history[quantity.__name__]) for r in (run, hooked))
    assert list(values) == [0, 10, 20]
    assert values == pytest.approx(expected, rel=1e-12)


def test_per_sample_losses_need_no_hooks() -> None:
    run = Run([Alpha(linear(5)), NormTest(linear(3))])
    for step in range(12):
        run.step(step)
    assert run.steps_with_hooks == [0, 1]
    expected = Run([Alpha(linear(5))])
    gradlens.extend(expected.loss_function)
    for step in range(12):
        expected.step(step)
    found = run.cockpit.history["Alpha"]
    assert list(found.values()) == pytest.approx(list(expected.cockpit.history["Alpha"].values()))
    with pytest.raises(TypeError, match="individual_losses"):
        gradlens.Cockpit(run.model, loss_function=nn.functional.cross_entropy)


def test_forward_says_which_step_comes() -> None:
    run = Run([BatchGradNorm(linear(10))])
    for step in JUMPING:
        run.optimizer.zero_grad()
        with run.cockpit.forward(step):
            loss = run.loss()
        assert has_layer_hooks(run.model) == (step % 10 == 0)
        with run.cockpit(step, loss=loss):
            loss.backward()
        run.optimizer.step()
    assert list(run.cockpit.history["BatchGradNorm"]) == [0, 10, 20]
    values = run.cockpit.history["BatchGradNorm"].values()
    assert all(isinstance(value, float) for value in values)


def test_micro_batches() -> None:
    cockpits = []
    for hooked in (False, True):
        run = Run([NormTest(linear(4)), Loss()])
        if hooked:
            gradlens.extend(run.model)
        for step in range(9):
            run.optimizer.zero_grad()
            for part in range(2):
                rows = slice(4 * part, 4 * part + 4)
                loss = run.loss_function(run.model(run.inputs[rows]), run.labels[rows])
                with run.cockpit(step, loss=loss, accumulating=part == 0):
                    (loss / 2).backward()
            run.optimizer.step()
        cockpits.append(run.cockpit)
    for name in ("NormTest", "Loss"):
        first, second = (dict(cockpit.history[name]) for cockpit in cockpits)
        assert first == second
    assert all(isinstance(value, float) for value in cockpits[0].history["Loss"].values())


def test_extensions_of_the_users_own() -> None:
    run = Run([Loss()])
    for step in range(6):
        run.step(step, *([BatchGrad()] if step in (0, 5) else []))
        if step in (0, 5):
            assert run.model[0].weight.grad_batch.shape == (8, 4, 5)
    late = Run([Loss()])
    for step in range(5):
        late.step(step)
    with pytest.raises(ValueError, match=r"BatchGrad .* gradlens\.extend\(model\)"):
        late.step(5, BatchGrad())


def test_two_cockpits_on_one_model() -> None:
    run = Run([BatchGradNorm(linear(5))])
    other = gradlens.Cockpit(run.model, [HessMaxEV(linear(3))])
    for step in range(10):
        run.optimizer.zero_grad()
        loss = run.loss()
        with run.cockpit(step, loss=loss), other(step, loss=loss):
            loss.backward()
        run.optimizer.step()
    assert list(run.cockpit.history["BatchGradNorm"]) == [0, 5]
    assert list(other.history["HessMaxEV"]) == [0, 3, 6, 9]
    del other
    gc.collect()
    for step in range(10, 14):
        run.step(step)
    assert run.steps_with_hooks == [10]


def test_per_sample_gradients_beside_a_cockpit() -> None:
    run = Run([NormTest(linear(5))])
    for step in range(3):
        run.step(step)
    assert run.steps_with_hooks == [0, 1]
    losses = nn.functional.cross_entropy(run.model(run.inputs), run.labels, reduction="none")
    expected = per_sample_gradients_of_losses(losses, run.model)
    with gradlens.per_sample_gradients(run.model) as gradients:
        run.loss().backward()
    assert gradients.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(gradients[name].dense(), expected[name], rtol=1e-9, atol=1e-12)


def test_copies_of_an_extended_model_have_per_sample_gradients() -> None:
    model = copy.deepcopy(gradlens.extend(nn.Sequential(nn.Linear(3, 2))))
    with gradlens.per_sample_gradients(model) as gradients:
        model(torch.ones(4, 3)).sum().backward()
    assert set(gradients) == {"0.weight", "0.bias"}


def test_a_closed_cockpit_has_no_layer_hooks() -> None:
    run = Run([NormTest()])
    run.step(0)
    run.cockpit.close()
    run.loss()
    assert not has_layer_hooks(run.model)
