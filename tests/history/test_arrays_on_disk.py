"""A history whose arrays are on disk is the same as one that has all in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import nn

from gradlens import Cockpit, CockpitPlotter, History, Undefined
from gradlens.cockpit.aggregation import Aggregation
from gradlens.cockpit.run import Run
from gradlens.history.coverage import Coverage
from gradlens.plotting.summary import summarize
from gradlens.quantities import Alpha, GradHist1d, GradNorm, Loss, UpdateSize
from tests.cases.steps import tracked_backward

STEPS = 9


QUANTITIES = [Loss(), GradNorm(), GradHist1d(), Alpha(), UpdateSize()]


class Recording:
    """A run that is recorded, without a recording."""

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        parameters = {"weight": nn.Parameter(torch.zeros(2, 3))}
        self.run = Run(Aggregation(QUANTITIES), parameters, path, resume, True)
        self.history = self.run.history

    def steps(self, first: int, last: int) -> Recording:
        for step in range(first, last):
            generator = np.random.default_rng(step)
            hist = {"hist": generator.poisson(5, 4), "edges": np.arange(5.0), "below": [step]}
            self.run.record(step, {"Loss": generator.random(), "GradHist1d": hist})
            self.run.record(step, {"GradNorm": {"weight": generator.random()}})
            alpha = Undefined(f"step {step}") if step % 4 == 3 else generator.normal()
            self.run.log(step, {"valid_loss": 1.0 / (step + 1), "remark": "something"})
            coverage = Coverage(samples=4 + step % 2, known_by="the loss")
            self.run.take_in(step, "coverage", coverage)
            if step:
                late = {"weight": generator.random()}
                self.run.record(step - 1, {"Alpha": alpha, "UpdateSize": late})
            if step == 6:
                self.run.log(1, {"valid_loss": 7.0, "late": True})
        return self


def pixels(history: History) -> Any:
    figure = CockpitPlotter().plot(history, show_plot=False)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


ACCESS: dict[str, Callable[[History], Any]] = {
    "steps": lambda history: history.steps,
    "names": lambda history: history.names,
    "values": lambda history: {name: dict(history[name]) for name in history.names},
    "single values": lambda history: [
        history[name].get(step) for name in history.names for step in range(-1, STEPS + 1)
    ],
    "contains": lambda history: [
        step in history[name] for name in history.names for step in range(-1, STEPS + 1)
    ],
    "lengths": lambda history: [len(history[name]) for name in history.names],
    "orders": lambda history: [[*history[name]] for name in history.names],
    "notes": lambda history: [note.text for note in history.notes],
    "coverage": lambda history: [history.coverage("GradHist1d", n) for n in range(STEPS)],
    "until": lambda history: {n: dict(history[:5][n]) for n in history.names},
    "summary": lambda history: [
        (row.last, row.change, row.steps) for row in summarize(history).rows
    ],
    "records": lambda history: [*history.records()],
}


@pytest.mark.slow
def test_every_access_finds_what_is_on_disk(tmp_path: Path) -> None:
    expected = Recording(None).steps(0, STEPS).history
    recording = Recording(tmp_path / "run.jsonl").steps(0, STEPS)
    for name, access in ACCESS.items():
        assert_identical_records(access(recording.history), access(expected), name)
    np.testing.assert_array_equal(pixels(recording.history), pixels(expected))
    recording.run.close()
    for name, access in ACCESS.items():
        assert_identical_records(access(recording.history), access(expected), name)
    recording.history.write(tmp_path / "written")
    expected.write(tmp_path / "expected")
    assert (tmp_path / "written").read_bytes() == (tmp_path / "expected").read_bytes()


def assert_identical_records(found: Any, expected: Any, access: str) -> None:
    try:
        np.testing.assert_equal(found, expected)
    except AssertionError as error:
        raise AssertionError(access) from error


def test_arrays_that_are_in_the_file_are_not_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    history = Recording(path).steps(0, STEPS).history
    assert history.content._texts
    assert not any(history.content._texts)
    path.unlink()  # the file is still open
    assert all(history["GradHist1d"][step]["hist"].size for step in range(STEPS))


def test_a_view_of_a_series_stays_up_to_date(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "run.jsonl").steps(0, 4)
    series = recording.history["Loss"]
    assert [*series] == [0, 1, 2, 3]
    recording.steps(4, STEPS)
    assert [*series] == [*range(STEPS)]
    assert series[5] == History.load(tmp_path / "run.jsonl")["Loss"][5]
    with pytest.raises(KeyError):
        series[STEPS]


def test_a_resumed_run_has_its_past(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Recording(path).steps(0, 5).run.close()
    recording = Recording(path, resume=True).steps(5, STEPS)
    recording.run.close()
    loaded = History.load(path)
    for access in ("steps", "values", "single values", "notes"):
        found, expected = ACCESS[access](recording.history), ACCESS[access](loaded)
        assert_identical_records(found, expected, access)
    assert recording.history.names == loaded.names


def test_a_file_that_was_changed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recording = Recording(path).steps(0, STEPS)
    recording.run.close()
    path.write_bytes(b"something else\n" * 1000)
    assert recording.history["Loss"][0] > 0
    with pytest.raises(OSError, match=r"run\.jsonl"):
        recording.history["GradHist1d"][0]


def test_a_checkpoint_takes_back_what_is_on_disk(tmp_path: Path) -> None:
    """A crash came after the checkpoint: what was recorded since is in the file alone."""

    def cockpit(resume: bool) -> Cockpit:
        path = tmp_path / "run.jsonl"
        tracked = [Loss(), UpdateSize()]
        return Cockpit(model, tracked, run=path, resume=resume)

    def train(run: Cockpit, steps: range, factor: float) -> None:
        for step in steps:
            tracked_backward(run, step, factor * model(torch.ones(4, 3)).square().mean())

    model = nn.Linear(3, 2)
    crashed = cockpit(resume=False)
    train(crashed, range(3), 1.0)
    state = crashed.state_dict()
    train(crashed, range(3, 8), 2.0)
    expected = dict(crashed.history["Loss"])
    crashed.close()

    resumed = cockpit(resume=True)
    resumed.load_state_dict(state)
    assert [*resumed.history["Loss"]] == [0, 1, 2]
    train(resumed, range(3, 6), 4.0)
    resumed.close()
    expected = {step: expected[step] * (1 if step < 3 else 2) for step in range(6)}
    assert dict(resumed.history["Loss"]) == pytest.approx(expected)
    assert dict(History.load(tmp_path / "run.jsonl")["Loss"]) == pytest.approx(expected)
    assert [*resumed.history["UpdateSize"]] == [0, 1, 2, 3, 4, 5]
