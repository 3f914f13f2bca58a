"""A run's file is continued from any prefix, and outlives whatever happens to it."""

from __future__ import annotations

import errno
import random
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradlens import Cockpit, History
from gradlens.history.run_file import RunFile
from gradlens.quantities import GradHist1d, GradNorm, Loss, Quantity
from tests.cases.steps import tracked_backward

STEPS = 4


def quantities() -> list[Quantity]:
    return [Loss(), GradNorm(), GradHist1d(bins=4, range=(-1.0, 1.0))]


class Training:
    """A small run under a cockpit, whose steps can be taken one by one."""

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.cockpit = Cockpit(self.model, quantities(), run=path, resume=resume)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        tracked_backward(self.cockpit, number, self.model(torch.ones(4, 3)).square().mean())
        self.optimizer.step()


def assert_same(found: History, expected: History, last: int = 10**6) -> None:
    """All values of ``expected`` up to a step are in ``found``."""
    for name in expected.names:
        for step, value in expected[name].items():
            if step <= last:
                np.testing.assert_equal(found[name][step], value)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """The content of a run's file, with a note and a text that isn't ASCII."""
    training = Training(tmp_path / "whole.jsonl")
    for step in range(STEPS):
        training.step(step)
    training.cockpit.close()
    return (tmp_path / "whole.jsonl").read_bytes()


def resumed(path: Path, step: int = STEPS) -> History:
    """The history in a file after it was continued by one step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training(path, resume=True)
        training.step(step)
        training.cockpit.close()
        return History.load(path)


def records(content: bytes) -> list[bytes]:
    return [line for line in content.split(b"\n") if line]


@pytest.mark.slow
def test_a_run_is_continued_from_any_prefix(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    random.seed(0)
    breaks = [n for n, byte in enumerate(whole) if byte == ord("\n")]
    near = [n + d for n in (*breaks, 0, len(whole)) for d in range(-3, 4)]
    cuts = {n for n in near if 0 <= n <= len(whole)} | {*random.sample(range(len(whole)), 100)}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        found = resumed(path)
        kept = whole[: cut + 1].count(b"\n")
        partial = cut and whole[cut - 1 : cut + 1].count(b"\n") == 0
        notes = [note.text for note in found.notes if "is continued" in note.text]
        assert bool(partial) == len(notes), cut
        assert all("its last line was cut off" in note for note in notes)
        lines = records(whole)[:kept]
        assert records(path.read_bytes())[:kept] == lines
        assert not found.truncated
        assert not found.broken_lines
        assert STEPS in found["Loss"]
        assert len(found["Loss"]) == sum(b'"Loss"' in line for line in lines[1:]) + 1


def test_what_was_left_out_is_said_once(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(whole.replace(b'"step":1,', b'"step":!,', 1))
    number = 1 + whole[: whole.index(b'"step":1,')].count(b"\n")
    for _ in range(2):
        found = resumed(path)
        (note,) = (note.text for note in found.notes)
        assert f"{path} is continued: line {number} is broken (" in note
    assert set(found["Loss"]) == {0, 2, 3, STEPS}


@pytest.mark.parametrize("content", [b"hello", b"hello\n", b'{"0": {}}', b"\0" * 99], ids=repr)
def test_another_file_is_not_continued(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a gradlens run"):
        Training(path, resume=True)
    assert path.read_bytes() == content


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_is_no_file(resume: bool, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=str(tmp_path)):
        Training(tmp_path, resume=resume)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/run\.jsonl"):
        Training(tmp_path / "file" / "run.jsonl", resume=resume)


# Writes that fail ---------------------------------------------------------------------------


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Nothing but a part of the next line can be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.stat().st_size if path.exists() else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 17, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def broken_disk(path: Path) -> Iterator[None]:
    """Nothing can be written."""

    def fail(file: RunFile) -> None:
        raise OSError(errno.EIO, "the disk is broken", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFile, "_write", fail)
        yield


OUTAGES: list[Callable[[Path], Any]] = [full_disk, broken_disk]
"""What keeps a file from being written for some time."""


def replaced(path: Path) -> None:
    path.unlink()
    path.write_text("something else\n")


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: list[Callable[[Path], None]] = [Path.unlink, replaced, replaced_by_a_folder]
"""What another program may do to the file."""


def parameters_after(training: Training) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in training.model.parameters()]


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda each: each.__name__)
def test_nothing_is_lost_while_the_file_cannot_be_written(
    outage: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "run.jsonl"
    path.parent.mkdir()
    plain = Training(None)
    training = Training(path)
    training.step(0)
    with outage(path):
        with pytest.warns(UserWarning, match=r"run\.jsonl can't be written from step 1 on \("):
            training.step(1)
        training.step(2)
    with pytest.warns(UserWarning, match="can be written again from step 3 on, and lacks nothing"):
        training.step(3)
    with outage(path), pytest.warns(UserWarning, match="can't be written from step 4 on"):
        training.step(4)
    with pytest.warns(UserWarning, match="can be written again from step 4 on"):
        training.cockpit.close()
    for step in range(5):
        plain.step(step)
    found = History.load(path)
    assert_same(found, plain.cockpit.history)
    assert [note.step for note in found.notes] == [1, 3, 4, 4]
    assert not found.truncated
    assert not found.broken_lines
    assert parameters_after(training) == parameters_after(plain)


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda each: each.__name__)
def test_a_run_that_ends_in_an_outage_says_what_its_file_lacks(
    outage: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "run.jsonl"
    path.parent.mkdir()
    training = Training(path)
    training.step(0)
    with outage(path):
        with pytest.warns(UserWarning, match="can't be written from step 1 on"):
            training.step(1)
        with pytest.warns(UserWarning, match=r"lacks the last records.*history\.write\(path\)"):
            training.cockpit.close()
    training.cockpit.history.write(tmp_path / "saved.jsonl")
    assert_same(History.load(tmp_path / "saved.jsonl"), training.cockpit.history)


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_what_another_program_leaves_is_kept(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "run.jsonl"
    training = Training(path)
    training.step(0)
    change(path)
    left = path.read_bytes() if path.is_file() else None
    for step in (1, 2):
        training.step(step)
    gone = pytest.warns(UserWarning, match=r"moved or removed.*history\.write\(path\)")
    with nullcontext() if path.exists() else gone:
        training.cockpit.close()
    assert (path.read_bytes() if path.is_file() else None) == left
    training.cockpit.history.write(tmp_path / "saved.jsonl")
    assert History.load(tmp_path / "saved.jsonl").steps == (0, 1, 2)


def test_a_disk_that_is_full_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with full_disk(path):
        with pytest.warns(UserWarning, match="can't be written from step 0 on"):
            training = Training(path)
        training.step(0)
    with pytest.warns(UserWarning, match="again from step 1 on"):
        training.step(1)
    training.cockpit.close()
    assert_same(History.load(path), training.cockpit.history)
