"""Steps, slices and tables of a history, in memory and in a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradlens import History, Undefined
from gradlens.cockpit.aggregation import Aggregation
from gradlens.cockpit.run import Run
from gradlens.history.coverage import Coverage
from gradlens.history.records import Note, Source
from gradlens.quantities import GradNorm, Loss
from tests.cases.records import assert_identical

STEPS = (0, 2, 3, 7, 10)


def in_memory(_: Path) -> History:
    """A history whose series have different steps."""
    sources = {"GradNorm": Source(("GradNorm",)), "Loss": Source(("Loss",))}
    history = History(sources, {"w": (2, 3), "b": (2,)})
    for step in STEPS:
        history.append(step, {"Loss": 10.0 - step})
    for step in (0, 3, 10):
        history.append(step, {"GradNorm": {"w": 3.0 * step, "b": 4.0 * step}})
    history.append(7, {"GradNorm": Undefined("no gradient")})
    history.append(2, {"parts": {"layers": {"0": {"rms": 1.5}}, "how": "exactly"}, "word": "a"})
    history.append(3, {"array": np.arange(3.0), "matrix": np.ones((2, 2))})
    history.append(7, {"array": Undefined("no gradient"), "eigenvalues": Undefined("no loss")})
    for step, values in ((2, [4.0, 2.0]), (3, [3.0])):
        found = {"values": np.array(values), "vectors": np.ones((2, 2)), "converged": True}
        history.append(step, {"eigenvalues": found})
    history.notes += [Note(0, "first"), Note(7, "second")]
    history.coverages[0] = Coverage(samples=4)
    return history


def in_a_file(folder: Path) -> History:
    """The same history, read from a file."""
    in_memory(folder).write(folder / "run.jsonl")
    return History.load(folder / "run.jsonl")


def in_both(folder: Path) -> History:
    """The same history, of which a part was read."""
    history = in_memory(folder)
    history[:3].write(folder / "run.jsonl")
    found = History.load(folder / "run.jsonl")
    for step in (3, 7, 10):
        found.append(step, history[step])
    found.notes.append(history.notes[1])
    return found


def while_recorded(folder: Path) -> History:
    """The same history, whose run goes on, and whose arrays are on disk alone."""
    history = in_memory(folder)
    parameters = {n: nn.Parameter(torch.zeros(shape)) for n, shape in history.parameters.items()}
    quantities = Aggregation([GradNorm(), Loss()])
    run = Run(quantities, parameters, folder / "recorded.jsonl", False, True)
    run.history.sources.update(history.sources)
    for step in history:
        run.record(step, history[step])
    run.history.notes += history.notes
    run.take_in(0, "coverage", history.coverages[0])
    assert not any(run.history.content._texts)
    return run.history


MAKERS = [in_memory, in_a_file, in_both, while_recorded]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def history(request: pytest.FixtureRequest, tmp_path: Path) -> History:
    make: Callable[[Path], History] = request.param
    return make(tmp_path)


def test_series(history: History, tmp_path: Path) -> None:
    expected = in_memory(tmp_path)
    assert {*history.names} == {*expected.names}
    for name in expected.names:
        found = history[name]
        assert_identical(dict(found), dict(expected[name]))
        assert_identical({step: found.get(step) for step in found}, dict(expected[name]))
        assert (len(found), [*reversed(found)]) == (len(expected[name]), [*expected[name]][::-1])


def test_steps(history: History) -> None:
    assert len(history) == len(STEPS)
    assert tuple(history) == STEPS
    assert 7 in history
    assert 8 not in history
    assert "Loss" in history
    assert "Los" not in history
    assert history
    assert not History()


def test_values_of_a_step(history: History) -> None:
    assert history[3]["Loss"] == 7.0
    assert {*history[3]} == {"Loss", "GradNorm", "array", "matrix", "eigenvalues"}
    assert history[np.int64(10)] == {"Loss": 0.0, "GradNorm": {"w": 30.0, "b": 40.0}}
    with pytest.raises(KeyError, match=r"nothing was recorded at step -1 .*steps 0 to 10"):
        history[-1]
    with pytest.raises(KeyError, match="this history has no steps"):
        History()[0]
    with pytest.raises(TypeError):
        history[1.5]  # type: ignore[call-overload]


SLICES = (
    (slice(None), STEPS, ["first", "second"]),
    (slice(2, 7), (2, 3), []),
    (slice(3, None), (3, 7, 10), ["second"]),
    (slice(None, 8), (0, 2, 3, 7), ["first", "second"]),
    (slice(None, None, 2), (0, 3, 10), ["first", "second"]),
    (slice(1, None, 3), (2, 10), ["second"]),
    (slice(4, 6), (), []),
)


@pytest.mark.parametrize(("bounds", "steps", "notes"), SLICES)
def test_slices(bounds: slice, steps: tuple[int, ...], notes: list[str], history: History) -> None:
    found = history[bounds]
    assert found.steps == steps
    assert [note.text for note in found.notes] == notes
    assert found.names == history.names
    assert (found.sources, found.coverages) == (history.sources, history.coverages)
    for step in steps:
        assert {*found[step]} == {*history[step]}
        assert found[step]["Loss"] == history[step]["Loss"]
    assert history.steps == STEPS  # which is left as it was


@pytest.mark.parametrize("bounds", [slice(-1, None), slice(None, -2), slice(None, None, -1)])
def test_negative_numbers_in_slices_are_refused(bounds: slice, history: History) -> None:
    with pytest.raises(ValueError, match=r"by the numbers of steps, .*history.steps\[-100\]:"):
        history[bounds]


def test_table_of_a_run(history: History) -> None:
    frame = history.to_dataframe()
    assert frame.index.name == "step"
    assert tuple(frame.index) == STEPS
    assert [*frame.columns] == [one.name for one in history.scalars()]
    assert frame["Loss"].tolist() == [10.0 - step for step in STEPS]
    norms = [0.0, math.nan, 15.0, math.nan, 50.0]
    assert frame["GradNorm"].tolist() == pytest.approx(norms, nan_ok=True)


TABLES: dict[str, dict[str, list[float]]] = {
    "Loss": {"Loss": [10.0 - step for step in STEPS]},
    "GradNorm": {"w": [0.0, 9.0, math.nan, 30.0], "b": [0.0, 12.0, math.nan, 40.0]},
    "parts": {"layers/0/rms": [1.5]},
    "array": {"0": [0.0, math.nan], "1": [1.0, math.nan], "2": [2.0, math.nan]},
    "eigenvalues": {
        "values/0": [4.0, 3.0, math.nan],
        "values/1": [2.0, math.nan, math.nan],
        "converged": [1.0, 1.0, math.nan],
    },
}


@pytest.mark.parametrize("name", TABLES)
def test_table_of_a_series(name: str, history: History) -> None:
    frame = history.to_dataframe(name)
    assert tuple(frame.index) == tuple(sorted(history[name]))
    assert [*frame.columns] == [*TABLES[name]]
    for column, values in TABLES[name].items():
        assert frame[column].tolist() == pytest.approx(values, nan_ok=True)


@pytest.mark.parametrize("name", ["matrix", "word"])
def test_table_of_a_series_without_numbers(name: str, history: History) -> None:
    with pytest.raises(ValueError, match=f"the values of '{name}' are no numbers"):
        history.to_dataframe(name)


def test_table_of_nothing() -> None:
    assert History().to_dataframe().empty
    with pytest.raises(KeyError, match="no series 'Loss'"):
        History().to_dataframe("Loss")
