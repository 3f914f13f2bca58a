"""The problems of the suite of faults train, the same way each time."""

from __future__ import annotations

import pytest
import torch

from benchmarks.diagnosis import development, unseen
from benchmarks.diagnosis.training import Training

TRAININGS = (*development.TRAININGS, *unseen.TRAININGS)
BY_NAME = {training.name: training for training in TRAININGS}


def test_no_two_have_the_same_name() -> None:
    assert len(BY_NAME) == len(TRAININGS)


@pytest.mark.parametrize("training", TRAININGS[::12], ids=lambda each: each.name)
@pytest.mark.slow
def test_data_depend_on_the_seed_alone(training: Training) -> None:
    state = torch.get_rng_state()
    first, torch_draws, again = training.data(0), torch.rand(3), training.data(0)
    other = training.data(1)
    torch.set_rng_state(state)
    assert torch.equal(torch_draws, torch.rand(3))
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, other.inputs)
