"""What is read from a file equals what was recorded, by every way of reading it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlens import History, Undefined
from gradlens.history.json_lines import to_line
from gradlens.history.lines import Line, field_line, line, line_through, lines
from gradlens.history.series import Content, Series
from gradlens.plotting.loading import GrowingRun
from tests.cases.records import assert_identical
from tests.history.test_history import example, values
from tests.instruments.test_instruments import realistic

numbers = st.floats() | st.integers(-3, 3) | st.booleans() | st.none()
odd = st.sampled_from([Undefined("one"), Undefined("two"), "text", 2**60])
leaves = numbers | odd | st.lists(numbers, max_size=2) | st.just(np.arange(3.0))
parts = st.dictionaries(st.sampled_from("abc"), leaves, max_size=3)
records = st.lists(
    st.tuples(st.integers(0, 12), numbers | odd | parts | st.dictionaries(st.just("a"), parts)),
    max_size=12,
)


def series_of(found: list[tuple[int, Any]]) -> Series:
    series = Series(Content())
    for step, value in found:
        series.add(step, json.loads(to_line({"value": value}))["value"])
    return series


def assert_equal_lines(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(found.steps, expected.steps)
    np.testing.assert_array_equal(found.values, expected.values)
    assert found.reason == expected.reason


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(-9, 9), values), max_size=6))
def test_a_series_is_a_mapping(found: list[tuple[int, Any]]) -> None:
    series, expected = series_of(found), dict(sorted(dict(found).items()))
    assert [*series] == [*expected]
    assert len(series) == len(expected)
    assert_identical([*series.values()], [*expected.values()])
    assert_identical(dict(series.items()), expected)
    assert [*reversed(series)] == [*expected][::-1]
    for step in range(-10, 11):
        assert (step in series) == (step in expected)
        assert_identical(series.get(step), expected.get(step))
        kept = {at: value for at, value in expected.items() if at <= step}
        assert_identical(dict(series.only([at for at in series if at <= step])), kept)


def part_of(value: Any, name: str) -> Any:
    """An entry of a dict, ``None`` if it has none, and any other value itself."""
    return value.get(name) if isinstance(value, dict) else value


def assert_line_through(found: Line, values: dict[int, Any]) -> None:
    steps = np.array([*values], dtype=np.float64)
    assert_equal_lines(found, line_through(steps, [*values.values()]))


@pytest.mark.slow
@given(records)
def test_entries_of_a_series_are_those_of_its_values(found: list[tuple[int, Any]]) -> None:
    series, values = series_of(found), dict(sorted(dict(found).items()))
    dicts = {step: value for step, value in values.items() if isinstance(value, dict)}
    names = tuple(dict.fromkeys(name for value in dicts.values() for name in value))
    assert series.entries == names
    assert series.kinds == {*map(type, values.values())}
    assert_line_through(line(series), values)
    for name in "abc":
        column = {step: part_of(value, name) for step, value in values.items()}
        assert_identical(dict(series.column(name)), column)
        assert_line_through(field_line(series, name), column)
        having = {step: value[name] for step, value in dicts.items() if name in value}
        assert_identical(dict(series.having(name)), having)
    for field in ("", "a", "b"):
        found_lines = lines(series, field)
        assert tuple(found_lines) == names
        for name, one in found_lines.items():
            column = {step: part_of(value, name) for step, value in values.items()}
            if field:
                column = {step: part_of(value, field) for step, value in column.items()}
            assert_line_through(one, column)


def test_what_is_no_value_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    example().write(path)
    broken = b'{"step":4,"values":{"Loss":2.5,"mine":{"a":[1.5,{"$float":"?"}]},"new":1}}\n'
    path.write_bytes(path.read_bytes() + broken)
    with pytest.warns(UserWarning, match="line 5 is broken"):
        found = History.load(path)
    assert found.steps == (3, 10)
    assert found.names == ("Loss", "mine")
    assert_identical(dict(found["mine"]), dict(example()["mine"]))


def test_a_series_grows_while_another_thread_reads_it() -> None:
    history = History()
    history.append(0, {"a": 1.0, "b": {"c": 2.0, "d": 3.0}})
    series = history["a"]
    read = np.frombuffer(history.content.numbers)
    history.append(1, {"a": 4.0, "b": Undefined("none")})
    history.append(2, {"a": Undefined("none"), "b": {"c": 5.0, "d": 6.0}})
    assert [*series] == [0, 1, 2]
    assert series[1] == 4.0
    assert history["b"][2] == {"c": 5.0, "d": 6.0}
    assert read.tolist() == [1.0, 2.0, 3.0]


# Reading on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_reading_on_from_anywhere_is_reading_all(seed: int, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    history = realistic(12, ("Loss", "GradNorm", "GradHist1d"))
    history.notes += example().notes
    history.write(whole)
    content, path = whole.read_bytes(), tmp_path / "run.jsonl"
    cuts = sorted(random.Random(seed).sample(range(20, len(content)), 20))
    ends = [n for n, byte in enumerate(content) if byte == ord("\n")]
    run = GrowingRun(path)
    for cut in sorted({*cuts, *ends[seed::3], *(end + 1 for end in ends[seed::4]), len(content)}):
        path.write_bytes(content[:cut])
        found, expected = run.read(), History.load(path)
        assert found.steps == expected.steps
        assert found.notes == expected.notes
        assert found.truncated == expected.truncated
        assert not found.broken_lines
    assert found.names == history.names
    for name in history.names:
        assert_identical(dict(found[name]), dict(History.load(whole)[name]))
