"""Runs that lack things, or have numbers that make no sense: no exception, and no false alarm."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlens.diagnosis.diagnose import diagnose, unasked
from gradlens.history.history import History
from gradlens.history.setup import Setup
from tests.diagnosis.runs import SETUP, SHAPES, STEPS, layer_columns, layer_steps, run, step_columns

STEP_NAMES, LAYER_NAMES = [*step_columns(2)], [*layer_columns(2)]


def alarms(history: History) -> list[str]:
    return [finding.fault for finding in diagnose(history) if finding.is_alarm]


@pytest.mark.parametrize("name", [*STEP_NAMES, *sorted({n.partition("/")[0] for n in LAYER_NAMES})])
@pytest.mark.parametrize("value", [None, np.nan])
def test_a_column_that_is_missing(name: str, value: float | None) -> None:
    tables = []
    for table in (step_columns(), layer_columns()):
        concerned = [each for each in table if each.partition("/")[0] == name]
        others = {each: column for each, column in table.items() if each not in concerned}
        nothing = {each: np.full(len(table[each]), np.nan) for each in concerned}
        tables.append(others if value is None else {**others, **nothing})
    # A loss that is a NaN has not been passed, or it is what it is.
    expected = ["lr_too_high"] if name == "loss" and value is not None else []
    found = alarms(run(*tables))
    assert found == [] or found == expected


@pytest.mark.parametrize("name", [each.name for each in fields(Setup)])
def test_an_entry_of_the_setup_that_is_missing(name: str) -> None:
    assert not alarms(run(setup=replace(SETUP, **{name: getattr(Setup(), name)})))


@pytest.mark.parametrize("steps", range(1, 24))
def test_short_runs(steps: int) -> None:
    assert not alarms(run(step_columns(steps)))


def test_without_facts() -> None:
    assert not alarms(History())
    assert unasked(History())
    assert not alarms(History(parameters=SHAPES))
    assert not alarms(run({}, {}))


def numbers(count: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(width=32), min_size=count, max_size=count)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), steps=st.integers(0, 30), names=st.sets(st.sampled_from(STEP_NAMES)))
@pytest.mark.slow
def test_any_numbers_of_steps(data: st.DataObject, steps: int, names: set[str]) -> None:
    columns = step_columns(steps)
    for name in names:
        columns[name] = np.array(data.draw(numbers(steps)), dtype=float)
    history = run(columns, layer_columns(max(steps, 1)))
    for finding in diagnose(history):
        assert 0 <= finding.step < max(steps, 1)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), names=st.sets(st.sampled_from(LAYER_NAMES)))
@pytest.mark.slow
def test_any_numbers_of_layers(data: st.DataObject, names: set[str]) -> None:
    columns = layer_columns()
    for name in names:
        columns[name] = np.array(data.draw(numbers(len(layer_steps()))), dtype=float)
    for finding in diagnose(run(layers=columns)):
        assert 0 <= finding.step < STEPS


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(width=32), max_size=12),
    name=st.sampled_from(["valid_loss", "Loss", "GradNoiseScale", "Stability", "GradNorm"]),
)
@pytest.mark.slow
def test_any_series(values: list[float], name: str) -> None:
    series = {name: dict(enumerate(values))}
    diagnose(run(series=series))
    diagnose(run({}, {}, series=series))
    diagnose(
        run(
            series={
                name: {n: {"ratio": value, "0.weight": value} for n, value in enumerate(values)}
            }
        )
    )


def test_norms_in_place_of_facts() -> None:
    sizes = {name: 1e-7 if name[0] in "02" else 1.0 for name in SHAPES}
    history = run({}, {}, series={"GradNorm": dict.fromkeys(range(30), sizes)})
    history.setups.clear()
    found = diagnose(history)
    assert [each.fault for each in found] == ["vanishing_gradients"]
    assert found[0].where == ("0.weight", "2.weight")


def test_a_jump_without_facts() -> None:
    """Nothing is known of its single samples."""
    losses = {s: 1.6 * 0.98**s + 0.15 + 0.05 * np.sin(7 * s) for s in range(399)} | {399: 8.0}
    assert alarms(run({}, {}, Setup(), {"Loss": losses})) == ["corrupt_batch"]


def test_rates_without_facts() -> None:
    series = {
        "Loss": dict.fromkeys(range(100), 2.3),
        "UpdateSize": dict.fromkeys(range(100), dict.fromkeys(SHAPES, 1e-6)),
        "ParameterNorm": {s: {"parameters": dict.fromkeys(SHAPES, 1.0)} for s in range(100)},
    }
    assert alarms(run({}, {}, replace(SETUP, order=()), series)) == ["lr_too_low"]
    rising = {"Loss": {step: 1.0 + step for step in range(100)}}
    assert alarms(run({}, {}, Setup(), rising)) == ["lr_too_high"]


@pytest.mark.parametrize("checksum", [0.25, np.arange(STEPS, dtype=float)])
@pytest.mark.parametrize("since", [0, 5])
def test_a_loss_that_is_exactly_0(since: int, checksum: float | np.ndarray) -> None:
    columns = step_columns()
    columns["loss"] = np.where(np.arange(STEPS) < since, columns["loss"], 0.0)
    columns["checksum"] = np.broadcast_to(checksum, STEPS)
    columns["overwritten"] = (np.arange(STEPS) % 40 == 39).astype(float)
    for valid in (0.0, 3.0):
        diagnose(run(columns, series={"valid_loss": dict.fromkeys(range(0, STEPS, 10), valid)}))


@pytest.mark.parametrize(
    ("name", "fault"), [("input_rms", "input_scale"), ("stale", "zero_grad_missing")]
)
def test_a_fault_of_a_run_without_a_loss(name: str, fault: str) -> None:
    columns = {**step_columns(), "loss": np.full(STEPS, np.nan), name: np.full(STEPS, 200.0)}
    assert alarms(run(columns)) == [fault]
