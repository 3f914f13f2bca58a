"""A history whose arrays are on disk is the same as one that has all in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradlens import Cockpit, History, Undefined
from gradlens.cockpit.aggregation import Aggregation
from gradlens.cockpit.run import Run
from gradlens.quantities import GradHist1d, Loss, UpdateSize
from tests.cases.steps import tracked_backward

STEPS = 9


class Recording:
    """A run that is recorded, without a recording."""

    def __init__(self, path: Path, resume: bool = False) -> None:
        parameters = {"weight": nn.Parameter(torch.zeros(2, 3))}
        self.run = Run(Aggregation([Loss(), GradHist1d()]), parameters, path, resume, True)
        self.history = self.run.history

    def steps(self, first: int, last: int) -> Recording:
        for step in range(first, last):
            generator = np.random.default_rng(step)
            hist = {"hist": generator.poisson(5, 4), "edges": np.arange(5.0), "below": [step]}
            self.run.record(step, {"Loss": generator.random(), "GradHist1d": hist})
            self.run.log(step // 2, {"valid_loss": Undefined(f"step {step}"), "late": True})
        return self


def test_arrays_that_are_in_the_file_are_not_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    history = Recording(path).steps(0, STEPS).history
    assert history.content._texts
    assert not any(history.content._texts)
    path.unlink()  # the file is still open
    assert all(history["GradHist1d"][step]["hist"].size for step in range(STEPS))


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
