"""From recorded values to arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gradlens.history.lines import line, number_lines, rms, rows
from gradlens.history.series import Series
from gradlens.history.undefined import Undefined

REASON = "one sample has no spread"


@pytest.mark.parametrize("most", [None, 2])
def test_rows_of_different_lengths_are_padded(most: int | None) -> None:
    table = rows([np.arange(3.0), None, [5.0], []], most)
    expected = np.array([[0, 1, 2], [math.nan] * 3, [5, math.nan, math.nan], [math.nan] * 3])
    np.testing.assert_array_equal(table, expected[:, :most])


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ([1, True, 2.5], [1, 1, 2.5]),
        ([1.0, "2", None], [1, math.nan, math.nan]),
        ([Undefined(REASON), np.float32(2)], [math.nan, 2]),
        ([[1.0], {"a": 1.0}], [math.nan, math.nan]),
    ],
)
def test_only_numbers_become_numbers(values: list[Any], numbers: list[float]) -> None:
    np.testing.assert_array_equal(line(Series.of(dict(enumerate(values)))).values, numbers)


def test_rms_of_arrays_of_several_shapes() -> None:
    arrays = [np.full(4, 2.0), None, np.full((2, 2), 3.0), np.array([]), np.full(4, 4.0)]
    np.testing.assert_array_equal([*map(rms, arrays)], [2, np.nan, 3, np.nan, 4])


PLACES = {
    "numbers": ((1.0, 2, True), {"": [1, 2, 1]}),
    "gaps": ((Undefined(REASON), 2.0), {"": [math.nan, 2]}),
    "by name": (({"a": 1.0}, {"a": 2.0, "b": 3.0}), {"a": [1, 2], "b": [3]}),
    "a gap among dicts": (({"a": 1.0}, Undefined(REASON)), {"a": [1]}),
    "nested": (
        ({"trace": 4.0, "parameters": {"w": {"trace": 1.0, "how": "exactly"}}},),
        {"trace": [4], "parameters/w/trace": [1]},
    ),
    "arrays and texts": (({"a": np.ones(2), "b": "word", "c": [1.0], "d": None},), {}),
    "words": (("a", "b"), {}),
}


@pytest.mark.parametrize("case", PLACES)
def test_places_of_numbers(case: str) -> None:
    values, expected = PLACES[case]
    found = number_lines(Series.of(dict(enumerate(values))))
    assert [*found] == [*expected]
    for place, numbers in expected.items():
        assert found[place].values.tolist() == pytest.approx(numbers, nan_ok=True)
