"""What a step's parts do to each other: of several quantities, contexts and backward passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradlens import Cockpit, quantities
from gradlens.schedules import linear
from tests.cases.steps import take_steps, tracked_backward


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3), torch.arange(6) % 2


def test_an_exception_in_a_part_of_an_untracked_step() -> None:
    """It has no consequences for the next step, and no note."""
    model = nn.Linear(3, 2)
    cockpit = Cockpit(model, [quantities.NormTest(linear(100))])
    inputs, labels = batch()
    for step in range(3):
        for part in range(2):
            loss = functional.cross_entropy(model(inputs), labels)
            try:
                with cockpit(step, loss=loss, accumulating=part == 0):
                    loss.backward()
                    if (step, part) == (1, 0):
                        raise KeyError
            except KeyError:
                continue
        model.zero_grad()
    assert not cockpit.history.notes


def test_a_context_inside_another_one_leaves_no_hook() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model, [quantities.UpdateSize()])
    inputs, labels = batch()
    losses = [functional.cross_entropy(model(inputs), labels) for _ in range(2)]
    with (
        cockpit(0, loss=losses[0], optimizer=optimizer),
        cockpit(1, loss=losses[1], optimizer=optimizer),
    ):
        (losses[0] + losses[1]).backward()
    optimizer.step()
    cockpit.close()
    assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]


def test_losses_of_samples_at_steps_that_a_budget_leaves_out() -> None:
    model = nn.Linear(3, 2)
    cockpit = Cockpit(model, [quantities.Loss(), quantities.NormTest(linear(1000))], budget=0.5)
    inputs, labels = batch()
    for step in range(1, 20):
        with cockpit.forward(step):
            loss = functional.cross_entropy(model(inputs), labels)
        tracked_backward(cockpit, step, loss, info={"ids": [*range(6)]})
        model.zero_grad()
    assert not [n for n in cockpit.history.notes if "losses of single samples" in n.text]


@pytest.mark.filterwarnings("ignore:gradlens, step")
def test_a_step_with_nothing_to_do_passes_by() -> None:
    """Layers' signals and what waits for the next step are those of the steps around it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    tracked = [quantities.NormTest(linear(4)), quantities.OutputNorm(linear(4))]
    tracked += [quantities.Alpha(linear(4))]
    cockpit = Cockpit(model, tracked, facts=False, autopsy=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(_: int) -> Tensor:
        inputs, labels = batch()
        return functional.cross_entropy(model(inputs), labels)

    take_steps(cockpit, optimizer, loss_of, range(10))
    for quantity in tracked:
        assert [*cockpit.history[quantity.name]] == [0, 4, 8]
    assert all(value > 0 for value in cockpit.history["NormTest"].values())
