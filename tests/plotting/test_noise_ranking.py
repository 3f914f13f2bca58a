"""Which layers are noisy: the ranking of a run's layers, and its text."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradlens.cli.summary_text import NOISIEST, as_json, render
from gradlens.history.history import History
from gradlens.history.records import Source
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.plotting.summary import LARGE_IS_NOISY, NoiseRanking, noise_rankings, summarize

WHY = Undefined("conv.weight has no per-sample gradients: it is frozen")


def recorded(*records: Any, kinds: tuple[str, ...] = ("NormTest",), name: str = "") -> History:
    name = name or kinds[0]
    history = History({name: Source(kinds, View("A title", label="θ"))})
    for step, record in enumerate(records):
        history.append(step, {name: record})
    return history


def ranking(*records: Any, **options: Any) -> NoiseRanking:
    (found,) = noise_rankings(recorded(*records, **options))
    return found


def of_layers(**values: float) -> dict[str, Any]:
    return {"value": 1.0, "layers": values}


def scale(value: float, squared_norm: float) -> dict[str, float]:
    return {"value": value, "low": 0.0, "high": math.inf, "squared_norm": squared_norm}


def test_layers_are_ranked_by_their_medians() -> None:
    found = ranking(
        of_layers(a=1.0, b=5.0, c=2.0), of_layers(a=1.0, b=0.1, c=3.0), of_layers(a=9.0, b=0.2, c=4)
    )
    assert [(one.name, one.last, one.median) for one in found.layers] == [
        ("c", 4, 3.0), ("a", 9.0, 1.0), ("b", 0.2, 0.2)
    ]  # fmt: skip
    assert (found.series, found.noun, found.label) == ("NormTest", "layer", "θ")


@pytest.mark.parametrize("kind", LARGE_IS_NOISY)
def test_the_noisiest_is_first(kind: str) -> None:
    found = ranking(of_layers(one=1.0, two=2.0), kinds=("Mine", kind), name="own")
    assert [one.name for one in found.layers] == (
        ["one", "two"] if kind == "MeanGSNR" else ["two", "one"]
    )
    assert found.series == "own"


@pytest.mark.parametrize(
    "history",
    [
        History(),
        recorded(),
        recorded(1.0, 2.0),
        recorded({"value": 1.0}),
        recorded(of_layers(a=1.0), kinds=("Mine",)),
        recorded({"value": 1.0, "low": 0.0, "squared_norm": 1.0}, kinds=("GradNoiseScale",)),
        recorded(WHY),
        recorded("text", {"layers": "text"}),
    ],
)
def test_other_series_have_no_ranking(history: History) -> None:
    assert noise_rankings(history) == ()


def test_layers_without_a_number_are_last_and_say_why() -> None:
    found = ranking(of_layers(a=WHY, b=1.0, c=WHY), of_layers(a=WHY, b=WHY, c=2.0), WHY)
    assert [one.name for one in found.layers] == ["c", "b", "a"]
    assert [one.reason for one in found.layers] == [WHY.reason] * 3
    assert math.isnan(found.layers[1].last)
    assert math.isnan(found.layers[2].median)


def test_a_noise_scale_whose_gradient_is_noise_is_infinite() -> None:
    noise, gone = Undefined("not distinguished"), dict.fromkeys(scale(0, 0), WHY)
    found = ranking(
        {**scale(3.0, 1.0), "layers": {"a": gone, "b": scale(9.0, 0.1), "c": scale(noise, -0.1)}},
        {**scale(3.0, 1.0), "layers": {"a": gone, "b": scale(noise, 0.0), "c": scale(noise, -1.0)}},
        {**scale(3.0, 1.0), "layers": {"a": gone, "b": scale(7.0, 0.2), "c": scale(5.0, 1.0)}},
        kinds=("GradNoiseScale",),
    )
    assert [(one.name, one.last, one.median) for one in found.layers[:2]] == [
        ("c", 5.0, math.inf), ("b", 7.0, 9.0)
    ]  # fmt: skip
    assert math.isnan(found.layers[2].median)


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@example([[0.0, 8.988465674311579e307], [0.0, 8.98846567431158e307]])  # their sum overflows
@given(
    st.integers(1, 6).flatmap(lambda rows: st.lists(
        st.lists(NUMBERS, min_size=rows, max_size=rows), min_size=1, max_size=8))
)  # fmt: skip
@pytest.mark.slow
def test_any_numbers_are_ranked(table: list[list[float]]) -> None:
    """Each layer is there once, in the order of its median by numpy in extended precision."""
    records = [of_layers(**{f"l{n}": value for n, value in enumerate(row)}) for row in table]
    history = recorded(*records)
    (found,) = noise_rankings(history)
    with np.errstate(all="ignore"):
        columns = [np.array(column, np.longdouble) for column in zip(*table, strict=True)]
        medians = [np.median(c[~np.isnan(c)]) if (~np.isnan(c)).any() else np.nan for c in columns]
    assert [one.median for one in sorted(found.layers, key=lambda one: one.name)] == pytest.approx(
        medians, nan_ok=True
    )
    known = [one.median for one in found.layers if not math.isnan(one.median)]
    assert known == sorted(known, reverse=True)
    assert [math.isnan(one.median) for one in found.layers] == sorted(
        math.isnan(one.median) for one in found.layers
    )
    for width in (20, 80):
        text = render(summarize(history), width)
        assert all(len(line) <= width for line in text.splitlines())


# In the summary -----------------------------------------------------------------------------


def section(history: History, width: int = 80) -> list[str]:
    """The lines about noise."""
    parts = render(summarize(history), width).split("\n\n")
    return next(part for part in parts if part.startswith("noisiest")).splitlines()


def test_a_ranking_in_words() -> None:
    values = {f"block{n}": float(n) for n in range(8)} | {"head": WHY, "stem": WHY}
    assert section(recorded(of_layers(**values), of_layers(**values | {"block7": 0.5}))) == [
        "noisiest of 10 layers by NormTest (θ)",
        "   layer  last  median",
        "  block6     6       6",
        "  block5     5       5",
        "  block4     4       4",
        "  block7   0.5    3.75",
        "  block3     3       3",
        "    no number for head, stem: conv.weight has no per-sample gradients: it is",
        "    frozen",
    ]


def test_small_values_of_a_ratio_of_signal_are_said_to_be_noisy() -> None:
    found = section(recorded(of_layers(a=1.0, b=2.0), kinds=("MeanGSNR",)))
    assert found[0] == "noisiest of 2 layers by MeanGSNR (θ; small is noisy)"
    assert found[2].split() == ["a", "1", "1"]


def test_all_layers_are_in_the_data() -> None:
    values = {f"l{n}": float(n) for n in range(2 * NOISIEST)} | {"gone": WHY}
    found = json.loads(as_json(summarize(recorded(of_layers(**values))), "run.jsonl"))
    (one,) = found["noise"]
    assert one["series"] == "NormTest"
    assert [each["name"] for each in one["layers"]] == [*reversed([*values][:-1]), "gone"]
    assert one["layers"][-1] == {
        "name": "gone", "last": None, "median": None, "reason": WHY.reason
    }  # fmt: skip
