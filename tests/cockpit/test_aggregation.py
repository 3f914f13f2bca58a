"""Statistics over epochs and windows of recorded values, in constant memory."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch import nn

from gradlens import Cockpit, History, quantities
from gradlens.cockpit.aggregation import Aggregate, Aggregation, statistics_of
from gradlens.history.undefined import Undefined
from gradlens.messages import GradlensWarning
from tests.cases.references import expected_statistics, numbers
from tests.cases.steps import tracked_backward


def activations(least: float, unit: int) -> dict[str, Any]:
    return {"layers": {"1": {"least": least, "least_unit": unit}}, "worst": least}


def test_an_index_has_no_statistics() -> None:
    records = [activations(0.3, 9), activations(0.1, 5)]
    found = statistics_of(records, ("min",))["layers"]["1"]
    assert [*found] == ["least"]
    assert found["least"]["min"] == 0.1


@pytest.mark.parametrize("order", [1, -1])
def test_a_layer_that_had_no_value_once_does_not_hide_the_others(order: int) -> None:
    """An empty batch's record is a NaN where others are dicts."""
    empty = {"layers": {"1": Undefined("the batch is empty"), "2": Undefined("no gradient")}}
    records = [empty, activations(0.5, 3), activations(0.25, 3)][::order]
    assert statistics_of(records, ("mean",)) == {
        "layers": {
            "1": {"least": {"mean": 0.375, "count": 2}},
            "2": {"mean": pytest.approx(math.nan, nan_ok=True), "count": 0, "undefined": 1},
        },
        "worst": {"mean": 0.375, "count": 2},
    }


def test_a_value_that_is_a_number_once_and_several_otherwise_loses_none() -> None:
    assert statistics_of((1.0, {"a": 2.0}, {"a": {"b": 3.0}}), ("max",)) == {
        "": {"max": 1.0, "count": 1},
        "a": {"": {"max": 2.0, "count": 1}, "b": {"max": 3.0, "count": 1}},
    }


def test_the_mean_of_a_noise_scale_is_the_ratio_of_means() -> None:
    """Of the true scale 100, single ratios are too large where the squared norm is small."""
    random = np.random.default_rng(0)
    squared_norms = random.normal(1.0, 0.7, 2000)
    records = [
        {"value": 100 / n if n > 0 else Undefined("none"), "trace": 100.0, "squared_norm": n}
        for n in squared_norms
    ]
    aggregation = Aggregation([Aggregate(quantities.GradNoiseScale(), statistics=("mean",))])
    for step, record in enumerate(records):
        aggregation.take_in(step, {"GradNoiseScale": record})
    found = aggregation.end_epoch(0)["GradNoiseScale (epoch)"]["value"]
    assert found["mean"] == pytest.approx(100 / squared_norms.mean())
    assert found["undefined"] == (squared_norms <= 0).sum()


def test_a_ratio_of_layers_without_a_positive_denominator_says_so() -> None:
    ratios = {"value": ("trace", "squared_norm")}
    layer = {"value": Undefined("none"), "trace": 2.0, "squared_norm": -1.0}
    found = statistics_of([{"layers": {"1": layer}}], ("mean",), ratios)["layers"]["1"]["value"]
    assert "squared_norm isn't positive" in found["mean"].reason


@pytest.mark.parametrize("record", [[1.0, 2.0], {"hist": np.ones(3)}, "text", None, {}])
def test_without_a_number_it_says_why(record: Any) -> None:
    aggregation = Aggregation([Aggregate(quantities.Loss(), statistics=("mean",))])
    aggregation.take_in(0, {"Loss": record})
    found = aggregation.end_epoch(0)["Loss (epoch)"]
    assert found["count"] == 0
    assert "there was no number in its values" in found["mean"].reason


# In a cockpit -----------------------------------------------------------------------------------


def train(tracked: list[Any], epochs: int = 3, length: int = 5, **arguments: Any) -> Cockpit:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model, tracked, **arguments)
    for step in range(epochs * length):
        optimizer.zero_grad()
        tracked_backward(cockpit, step, model(torch.randn(6, 4)).square().mean())
        optimizer.step()
        if step % length == length - 1:
            cockpit.tick_epoch()
    return cockpit


@pytest.mark.parametrize("name", ["Loss", "OutputNorm", "UpdateSize", "GradientGeometry"])
def test_epochs_are_those_of_the_values_themselves(name: str) -> None:
    build = getattr(quantities, name)
    raw = train([build()]).history[name]
    aggregated = train([Aggregate(build())]).history
    assert aggregated.names == (f"{name} (epoch)",)
    records = aggregated[f"{name} (epoch)"]
    assert [*records] == [4, 9, 14]
    for last, record in records.items():
        told = [dict(numbers(raw[step])) for step in range(last - 4, last + 1)]
        found = dict(numbers(record))
        for path in told[0]:
            known = [value[path] for value in told if not math.isnan(value[path])]
            for statistic, value in expected_statistics(known).items():
                assert found[(*path, statistic)] == pytest.approx(value)


def test_windows_are_recorded_when_they_are_full_and_the_rest_at_the_end() -> None:
    cockpit = train([Aggregate(quantities.Loss(), over=4, raw=True, statistics=("min", "max"))])
    assert cockpit.history.names == ("Loss", "Loss (window)")
    cockpit.close()
    loss, windows = cockpit.history["Loss"], cockpit.history["Loss (window)"]
    assert [*windows] == [3, 7, 11, 14]
    assert windows[7] == {"min": min(loss[s] for s in range(4, 8)),
                          "max": max(loss[s] for s in range(4, 8)), "count": 4}  # fmt: skip
    assert windows[14]["count"] == 3
    cockpit.close()
    assert len(windows) == 4


def test_an_epoch_that_nobody_ended_is_recorded_at_the_end() -> None:
    cockpit = train([Aggregate(quantities.Loss())], epochs=1, length=3)
    step(cockpit, 3)
    cockpit.close()
    assert cockpit.history["Loss (epoch)"][3]["count"] == 1


def step(cockpit: Cockpit, number: int) -> None:
    assert cockpit.model is not None
    cockpit.model.zero_grad()
    tracked_backward(cockpit, number, cockpit.model(torch.randn(6, 4)).square().mean())


def test_pushed_metrics(tmp_path: Path) -> None:
    cockpit = train([quantities.Loss()], epochs=1, run=tmp_path / "run.jsonl")
    for accuracy in (0.5, 0.7):
        cockpit.push(valid_accuracy=accuracy, valid_loss=torch.tensor(1.0))
    cockpit.tick_epoch()
    cockpit.close()
    for history in (cockpit.history, History.load(tmp_path / "run.jsonl")):
        assert history["valid_accuracy"][4] == pytest.approx(expected_statistics([0.5, 0.7]))
        assert history["valid_loss"][4]["count"] == 2
        assert history.sources["valid_accuracy"].kind == "Aggregate"


NUMBERS = (1, True, np.float32(1), np.ones((1, 1)), torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("value", [*NUMBERS, torch.ones((), dtype=torch.bfloat16)])
def test_numbers_of_all_kinds_can_be_pushed(value: Any) -> None:
    cockpit = Cockpit(nn.Linear(1, 1), [quantities.Loss()])
    cockpit.push(metric=value)
    cockpit.push(metric=Undefined("no sample was left"))
    cockpit.tick_epoch()
    record = cockpit.history["metric"][0]
    assert (record["mean"], record["count"], record["undefined"]) == (1.0, 1, 1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x", "'x'"), (None, "None"), ({"a": 1.0}, "{'a': 1.0}"), ([1.0], "[1.0]"),
        (torch.ones(3), "a Tensor of shape (3,) and torch.float32"),
        (np.zeros((0, 2)), "a ndarray of shape (0, 2) and float64"), (1j, "1j"),
        (torch.ones(1, dtype=torch.complex64), "a Tensor of shape (1,) and torch.complex64"),
        pytest.param(10**400, "1000", id="huge"), (len, "<built-in function len>"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_refused_by_name(value: Any, shown: str) -> None:
    cockpit = Cockpit(nn.Linear(1, 1), [quantities.Loss()])
    words = r"^push\(valid_loss=...\) takes a number, or a tensor .*, and got "
    with pytest.raises(TypeError, match=words + re.escape(shown)):
        cockpit.push(accuracy=1.0, valid_loss=value)
    cockpit.tick_epoch()
    assert "accuracy" not in cockpit.history


TAKEN = "Loss", "Time", "Time (epoch)", "train_loss"


@pytest.mark.parametrize("name", TAKEN)
def test_a_name_that_another_series_has_cannot_be_pushed(name: str) -> None:
    cockpit = train([quantities.Loss(), Aggregate(quantities.Time())], epochs=1)
    cockpit.log(4, train_loss=2.0)
    before = {series: dict(cockpit.history[series]) for series in cockpit.history.names}
    with pytest.raises(
        ValueError, match=re.escape(f"push({name}=...): there is a series {name!r}")
    ):
        cockpit.push(**{"fine": 1.0, name: 5.0})
    cockpit.tick_epoch()
    assert {series: dict(cockpit.history[series]) for series in cockpit.history.names} == before


@pytest.mark.parametrize("ticked", [False, True])
def test_a_metric_that_was_pushed_cannot_be_logged(ticked: bool) -> None:
    cockpit = train([quantities.Loss()], epochs=1)
    cockpit.push(valid_loss=1.0)
    if ticked:
        cockpit.tick_epoch()
    with pytest.raises(ValueError, match="a series 'valid_loss' of push"):
        cockpit.log(4, valid_loss=3.0)


def test_two_records_of_one_step_are_one() -> None:
    """Nothing is lost where an epoch ends twice without a step in between."""
    cockpit = train([Aggregate(quantities.Loss())], epochs=1)
    for value in (1.0, 2.0):
        cockpit.push(valid=value)
        cockpit.tick_epoch()
    cockpit.tick_epoch()
    cockpit.push(valid=6.0)
    cockpit.close()
    assert cockpit.history["valid"][4] == pytest.approx(expected_statistics([1.0, 2.0, 6.0]))
    assert cockpit.history["Loss (epoch)"][4]["count"] == 5


def test_steps_may_go_back() -> None:
    """As after a return to an earlier checkpoint."""
    cockpit = train([Aggregate(quantities.Loss())])
    with pytest.warns(GradlensWarning, match="comes after a later one"):
        step(cockpit, 7)
    step(cockpit, 8)
    cockpit.tick_epoch()
    assert [*cockpit.history["Loss (epoch)"]] == [4, 8, 9, 14]


def test_epochs_without_steps_record_nothing() -> None:
    cockpit = Cockpit(nn.Linear(4, 1), [Aggregate(quantities.Loss())])
    cockpit.tick_epoch()
    cockpit.tick_epoch()
    assert cockpit.history.steps == ()
    cockpit.push(valid=1.0)
    cockpit.tick_epoch()
    step(cockpit, 0)
    cockpit.push(valid=2.0)
    cockpit.tick_epoch()
    assert cockpit.history["valid"][0]["count"] == 2


def test_a_run_that_is_resumed_in_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    cockpit = train([Aggregate(quantities.Loss())], epochs=2, run=path)
    step(cockpit, 10)
    cockpit.push(valid=1.0)
    cockpit.close()
    cockpit = Cockpit(nn.Linear(4, 3), [Aggregate(quantities.Loss())], run=path, resume=True)
    with pytest.raises(
        ValueError, match=r"push\(valid=...\): the run that is resumed has a record"
    ):
        cockpit.push(valid=2.0)
    cockpit.push(other=3.0)
    cockpit.tick_epoch()
    for number in (11, 12):
        step(cockpit, number)
    cockpit.push(valid=2.0)
    cockpit.close()
    for history in (cockpit.history, History.load(path)):
        found = {at: record["count"] for at, record in history["Loss (epoch)"].items()}
        assert found == {4: 5, 9: 5, 10: 1, 12: 2}
        assert {at: record["mean"] for at, record in history["valid"].items()} == {10: 1, 12: 2}
        assert [*history["other"]] == [10]
