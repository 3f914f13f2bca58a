"""Statistics of a stream of numbers: against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradlens.cockpit.aggregation import STATISTICS, summary
from gradlens.history.undefined import Undefined
from tests.cases.references import expected_statistics

STREAMS = {
    "one": [3.5],
    "two": [2.0, -1.0],
    "equal": [7.0] * 9,
    "normal": list(np.random.default_rng(0).normal(1e6, 1.0, 500)),
}


INFINITE = "there are infinities among the numbers"
TOO_LARGE = "the numbers, or their squares, are too large to be added up"
EXTREMES: dict[str, tuple[list[float], dict[str, float | str]]] = {
    "an infinity": (
        [1.0, math.inf, 2.0, 3.0],
        {"mean": math.inf, "std": INFINITE, "q1": 1.75, "median": 2.5, "q3": math.inf,
         "iqr": math.inf, "min": 1.0, "max": math.inf},
    ),
    "of both signs": (
        [math.inf, -math.inf],
        {"mean": INFINITE, "std": INFINITE, "q1": INFINITE, "median": INFINITE, "q3": INFINITE,
         "iqr": INFINITE, "min": -math.inf, "max": math.inf},
    ),
    "negative": (
        [-math.inf, 0.0, 1.0, 2.0],
        {"mean": -math.inf, "std": INFINITE, "q1": -math.inf, "median": 0.5, "q3": 1.25,
         "iqr": math.inf, "min": -math.inf, "max": 2.0},
    ),
    "alone": (
        [math.inf] * 3,
        {"mean": math.inf, "std": INFINITE, "q1": math.inf, "median": math.inf, "q3": math.inf,
         "iqr": INFINITE, "min": math.inf, "max": math.inf},
    ),
    "too large to be squared": (
        [1e200, 2e200],
        {"mean": 1.5e200, "std": TOO_LARGE, "q1": 1.25e200, "median": 1.5e200, "q3": 1.75e200,
         "iqr": 0.5e200, "min": 1e200, "max": 2e200},
    ),
    "too far apart": (
        [-1.5e308, 1.5e308],
        {"mean": TOO_LARGE, "std": TOO_LARGE, "q1": -0.75e308, "median": 0.0, "q3": 0.75e308,
         "iqr": 1.5e308, "min": -1.5e308, "max": 1.5e308},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EXTREMES)
def test_statistics_of_extremes_are_numbers_or_say_why_not(case: str) -> None:
    values, known = EXTREMES[case]
    found = summary(values)
    for name, value in found.items():
        if name == "count":
            assert value == len(values)
        elif isinstance(known[name], str):
            assert isinstance(value, Undefined), name
            assert value.reason == known[name]
        else:
            assert value == pytest.approx(known[name]), name


@pytest.mark.parametrize("case", STREAMS)
def test_statistics(case: str) -> None:
    found = summary(STREAMS[case])
    assert set(found) == {*STATISTICS, "count"}
    assert found == pytest.approx(expected_statistics(STREAMS[case]), rel=1e-12, abs=1e-9)


def test_statistics_do_not_lose_digits() -> None:
    found = summary([1e9 + 1, 1e9 + 2, 1e9 + 3])
    assert found["std"] == pytest.approx(math.sqrt(2 / 3))
    equal = summary([0.1] * 9)
    assert (equal["mean"], equal["std"], equal["iqr"]) == (0.1, 0, 0)


def test_undefined_values_are_left_out_and_lend_their_reason() -> None:
    found = summary([Undefined("first step"), 2.0, 4.0])
    assert found["mean"] == 3
    assert found["undefined"] == 1
    assert "undefined" not in summary([2.0])
    nothing = summary([Undefined("first step"), math.nan])
    assert nothing["count"] == 0
    assert nothing["median"].reason == "first step"  # type: ignore[attr-defined]
    assert summary([math.nan])["std"].reason == "all numbers were NaN"  # type: ignore[attr-defined]
    assert summary([])["mean"].reason == "there was no number"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "mean"), [((1e200, -1e200), 0.0), ((math.inf, math.inf), math.inf)]
)
def test_means_of_extremes(values: tuple[float, ...], mean: float) -> None:
    assert summary(values)["mean"] == mean
