"""Schedules are plain functions of the step."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradlens
from gradlens import quantities, schedules
from tests.cases.steps import tracked_backward


@given(st.integers(1, 50), st.integers(0, 50))
def test_linear(interval: int, offset: int) -> None:
    schedule = schedules.linear(interval, offset)
    tracked = [step for step in range(-10, 200) if schedule(step)]
    assert tracked == list(range(offset, 200, interval))


def test_a_number_is_a_schedule() -> None:
    quantity = quantities.GradNorm(10)
    assert [step for step in range(40) if quantity.should_compute(step)] == [0, 10, 20, 30]
    with pytest.raises(ValueError, match="tracks nothing: use 1 or more"):
        quantities.GradNorm(0)
    with pytest.raises(TypeError, match="pass a number of steps, or a function"):
        quantities.GradNorm(True)


def test_logarithmic_takes_exponents() -> None:
    schedule = schedules.logarithmic(0, 3, steps=4)
    assert [step for step in range(2000) if schedule(step)] == [0, 1, 10, 100, 1000]
    without = schedules.logarithmic(1, 3, steps=3, base=2, init=False)
    assert [step for step in range(20) if without(step)] == [2, 4, 8]


def test_equal_and_picklable() -> None:
    for schedule in (schedules.linear(3, 1), schedules.logarithmic(0, 2)):
        assert pickle.loads(pickle.dumps(schedule)) == schedule


DECISIONS: dict[str, tuple[Callable[[int], Any], bool]] = {
    "a bool": (lambda step: step % 2 == 0, True),
    "a bool of numpy": (lambda step: np.mod(step, 2) == 0, True),
    "an array of numpy": (lambda step: np.array(step % 2 == 0), True),
    "a tensor": (lambda step: torch.tensor(step) % 2 == 0, True),
    "of the library": (schedules.linear(2), True),
    "nothing": (lambda step: None, False),
    "nothing at some steps": (lambda step: True if step % 2 == 0 else None, False),
    "a number": (lambda step: 1 - step % 2, False),
    "a real number": (lambda step: 1.0 - step % 2, False),
    "a number of numpy": (lambda step: np.int64(1 - step % 2), False),
    "a real tensor": (lambda step: torch.tensor(1.0 - step % 2), False),
    "a text": (lambda step: "yes" if step % 2 == 0 else "", False),
    "a list": (lambda step: [step] * (step % 2 == 0), False),
    "another schedule": (lambda step: schedules.linear(2), False),
    "several": (lambda step: np.array([step % 2 == 0] * 2), False),
}


@pytest.mark.filterwarnings("ignore::gradlens.messages.GradlensWarning")
@pytest.mark.parametrize("name", DECISIONS)
def test_a_schedule_says_true_or_false(name: str) -> None:
    """What else it returns tracks nothing, and is noted once, at the first step."""
    schedule, is_right = DECISIONS[name]
    cockpit = gradlens.Cockpit(nn.Linear(2, 1), [quantities.GradNorm(schedule)])
    for step in range(5):
        loss = cockpit.model(torch.ones(3, 2)).sum()  # type: ignore[misc]
        tracked_backward(cockpit, step, loss)
    cockpit.close()
    if is_right:
        assert [*cockpit.history["GradNorm"]] == [0, 2, 4]
        assert not cockpit.history.notes
        return
    first = 1 if name == "nothing at some steps" else 0
    assert [*cockpit.history["GradNorm"]] == ([0, 2, 4] if first else [])
    (note,) = cockpit.history.notes
    assert note.step == first
    said = (
        "The truth value" if name == "several" else "it returns .*: return True or False, as lambda"
    )
    assert re.match(f"GradNorm's schedule failed: .*{said}", note.text)
