"""Schedules are plain functions of the step."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from gradlens import schedules


@given(st.integers(1, 50), st.integers(0, 50))
def test_linear(interval: int, offset: int) -> None:
    schedule = schedules.linear(interval, offset)
    tracked = [step for step in range(-10, 200) if schedule(step)]
    assert tracked == list(range(offset, 200, interval))


def test_logarithmic_takes_exponents() -> None:
    schedule = schedules.logarithmic(0, 3, steps=4)
    assert [step for step in range(2000) if schedule(step)] == [0, 1, 10, 100, 1000]
    without = schedules.logarithmic(1, 3, steps=3, base=2, init=False)
    assert [step for step in range(20) if without(step)] == [2, 4, 8]


def test_equal_and_picklable() -> None:
    for schedule in (schedules.linear(3, 1), schedules.logarithmic(0, 2)):
        assert pickle.loads(pickle.dumps(schedule)) == schedule
