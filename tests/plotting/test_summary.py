"""The table of a run, and its text in a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gradlens.cli.panels_text import LEVELS, sparkline
from gradlens.cli.summary_text import NOTES, render
from gradlens.history.history import History
from gradlens.history.lines import Line
from gradlens.history.records import Note, Source
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.plotting.summary import Summary, relative_change, summarize
from tests.instruments.test_instruments import realistic, recorded, same


def run(values: Sequence[float], every: int = 1, name: str = "Loss") -> History:
    """A run with one number per step."""
    return recorded(name, {place * every: value for place, value in enumerate(values)})


def table(history: History, width: int = 80) -> dict[str, list[str]]:
    """The words of each line of a text by their first one."""
    lines = [line.split() for line in render(summarize(history), width).splitlines()]
    return {words[0]: words[1:] for words in lines if words}


# The table ----------------------------------------------------------------------------------


EARLY, LATE, WHY = map(Undefined, ("early", "late", "why"))
NOTHING = {"min": None, "min_step": None, "max": None, "max_step": None, "undefined": 3}
ROWS: list[tuple[list[float], int, dict[str, Any]]] = [
    ([3.0, 1.0, 5.0, 1.0, 5.0, 2.0], 10,
     {"last": 2.0, "min": 1.0, "min_step": 10, "max": 5.0, "max_step": 20, "steps": 6,
      "undefined": 0, "undefined_step": None, "reason": ""}),
    ([EARLY, 1.0, LATE, 2.0, math.nan], 1,
     {"last": math.nan, "min": 1.0, "min_step": 1, "max": 2.0, "max_step": 3,
      "undefined": 3, "undefined_step": 4, "reason": "late"}),
    ([WHY, WHY, WHY], 1, {**NOTHING, "change": math.nan}),
    ([1.0, math.inf, 2.0], 1, {"max": math.inf, "max_step": 1, "undefined": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("values", "every", "expected"), ROWS)
def test_rows(values: list[float], every: int, expected: dict[str, Any]) -> None:
    """The last value, the extremes with their first steps, the gaps and the latest reason."""
    (found,) = summarize(run(values, every)).rows
    told = {name: getattr(found, name) for name in expected}
    assert told == {n: pytest.approx(e, nan_ok=True) if e else e for n, e in expected.items()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0], 1.0),
        ([2.0, 1.0], -0.5),
        ([-1.0, -2.0], -1.0),
        ([-2.0, -1.0], 0.5),
        ([9.0] * 6 + [2.0, 2.0, 3.0, 3.0], 0.5),
        ([9.0] * 5 + [2.0, 2.0, 2.0, math.nan, 3.0, 3.0], 0.5),
        ([2.0] * 50 + [100.0] + [2.0] * 49, 0.0),
        ([1.0], math.nan),
        ([], math.nan),
        ([math.nan, math.inf], math.nan),
        ([-1.0, 1.0], math.nan),
        ([0.0, 1.0], math.nan),
        ([1e-300, 1e300], math.inf),
    ],
)
def test_relative_change(values: list[float], expected: float) -> None:
    assert relative_change(np.array(values)) == pytest.approx(expected, nan_ok=True)


def test_series_without_numbers_and_notes() -> None:
    history = realistic(20, ("Loss", "SpectralDensity", "Alpha"))
    history.append(0, {"words": "hello"})
    history.add_sources({"Never": Source(("Never",), View("Never"))})
    found = summarize(replace(history, notes=[Note(3, "hm")], truncated=True))
    assert found.others == {"SpectralDensity": 2, "words": 1, "Never": 0}
    assert found.history.truncated


# The text -----------------------------------------------------------------------------------


def test_a_line_of_the_table() -> None:
    found = table(run([4.0] * 8 + [1.0, 2.0]))
    assert found["series"] == ["last", "trend", "change", "min", "step", "max", "step", "steps"]
    assert found["Loss"] == ["2", "████████▁▃", "↘", "-62%", "1", "8", "4", "0", "10"]
    assert table(run([1.0, 20.0]))["Loss"][2:4] == ["↗", "×20"]


def long_names() -> History:
    history = run([1.0, -1.2345e-7], every=9_999_999, name="A series with a very long name " * 3)
    history.append(0, {"A rather long name of another quantity, too": Undefined("because " * 50)})
    history.notes += [Note(n, f"note {n} " + "word " * 60) for n in range(3)]
    return history


HISTORIES: dict[str, Callable[[], History]] = {
    "realistic": lambda: realistic(100),
    "long": lambda: realistic(500),
    "undefined": lambda: same(realistic(20), lambda step, old: Undefined("why " * 40)),
    "long names": long_names,
    "one step": lambda: realistic(1),
    "no steps": lambda: realistic(0),
    "empty": History,
    "unbroken": lambda: run([Undefined("x" * 300)]),
}


@cache
def summary(scene: str) -> Summary:
    """Only once, for histories take a while to make."""
    return summarize(HISTORIES[scene]())


@pytest.mark.parametrize("scene", HISTORIES)
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_fits_the_width(scene: str, width: int) -> None:
    text = render(summary(scene), width, "some/run.jsonl")
    assert max(map(len, text.splitlines())) <= width
    assert not any(line != line.rstrip() and line.strip() == "" for line in text.splitlines())


def test_room_is_used_for_trends() -> None:
    found = summarize(realistic(500, ("Loss",)))

    def trend(width: int) -> str:
        line = render(found, width).splitlines()[-1]
        return "".join(sign for sign in line if sign in LEVELS)

    assert len(trend(80)) < len(trend(100)) < len(trend(200)) == 48


def test_a_reason_is_said_once() -> None:
    history = run([1.0, Undefined("too noisy")])
    (first,) = history.names
    history.append(1, {"second": Undefined("too noisy"), "third": Undefined("unknown")})
    text = render(summarize(history), 80)
    assert text.count("too noisy") == text.count("unknown") == 1
    assert f"1 NaN, the latest at step 1: as for {first}" in text


def test_words_under_the_table() -> None:
    history = run([1.0, Undefined("too\nnoisy\x1b[31m")])
    history.append(1, {"words": "hello"})
    history.add_sources({"Never": Source(("Never",), View("Never"))})
    history.notes += [Note(n, f"remark {n}") for n in range(NOTES + 2)]
    text = render(summarize(history), 80, "run.jsonl")
    lines = text.splitlines()
    assert lines[0] == "run.jsonl: 2 steps, 0 to 1"
    assert "    1 NaN, the latest at step 1: too noisy?[31m" in lines
    assert "without single numbers: words" in lines
    assert "without records: Never" in lines
    assert f"notes (the latest {NOTES} of {NOTES + 2})" in lines
    assert lines[-1] == f"  step {NOTES + 1}: remark {NOTES + 1}"
    assert "remark 1\n" not in text


# Trends in a line ---------------------------------------------------------------------------


def steps(*values: float) -> Line:
    return Line(np.arange(len(values), dtype=np.float64), np.array(values))


@pytest.mark.parametrize(
    ("line", "width", "log", "expected"),
    [
        (steps(*range(8)), 8, False, LEVELS),
        (steps(*range(8)), 20, False, LEVELS),
        (steps(1, 10, 100, 1000, 1e4, 1e5, 1e6, 1e7), 8, True, LEVELS),
        (steps(0, 10, 100), 3, True, "▁▂█"),
        (steps(1, 1, 5, 5, 1, 1), 3, False, "▁█▁"),
        (steps(2, 2, 2), 3, False, "▁▁▁"),
        (steps(0, 0), 2, False, "▁▁"),
        (steps(1, math.nan, 2, math.inf), 4, False, "▁ █ "),
        (steps(math.nan, math.nan), 2, False, "  "),
        (steps(7), 5, False, "▁"),
        (steps(), 5, False, ""),
        (steps(-1.7e308, 1.7e308), 2, False, "▁█"),
        (Line(np.array([0.0, 1.0, 10.0]), np.array([0.0, 0.0, 1.0])), 3, False, "▁ █"),
    ],
)
def test_sparkline(line: Line, width: int, log: bool, expected: str) -> None:
    assert sparkline(line, width, log) == expected


@pytest.mark.parametrize("width", [40, 50, 60, 80])
def test_columns_are_left_out_before_names_are_cut(width: int) -> None:
    history = History()
    name = "GradCovariance of layers"
    for step in range(10):
        history.append(step, {name: -1.0 - step})
    rows = render(summarize(history), width).splitlines()
    heading, row = next(pair for pair in pairwise(rows) if pair[0].startswith("series"))
    assert row.startswith(name)
    assert len(heading) <= width
    assert heading.split()[:2] == ["series", "last"]
    assert ("steps" in heading) == (width == 80)


@pytest.mark.parametrize("value", [-1.5, -2.5e-7, -3e12, math.inf, -math.inf])
def test_numbers_can_be_read_by_float(value: float) -> None:
    history = History()
    history.append(0, {"Loss": 1.0})
    history.append(1, {"Loss": value})
    assert float(table(history)["Loss"][0]) == pytest.approx(value)
