"""Records survive the disk, killed processes and careless users."""

from __future__ import annotations

import json
import math
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gradlens import History, Undefined, View
from gradlens.history.coverage import Coverage
from gradlens.history.json_lines import stored_record, to_line
from gradlens.history.records import LeftOutWarning, Note, Source
from gradlens.history.run_file import OwnFiles
from gradlens.history.series import value_of
from gradlens.messages import GradlensWarning
from tests.cases.records import assert_identical

scalars = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text()
arrays = npst.arrays(
    st.sampled_from([np.float64, np.float32, np.int64, np.uint8, np.bool_]),
    npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4),
)
undefined = st.builds(Undefined, st.text())
values = st.recursive(
    scalars | arrays | undefined,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def from_line(line: str) -> Any:
    """The record in a line."""
    return value_of(stored_record(line))


@pytest.mark.slow
@given(values)
def test_round_trip(value: Any) -> None:
    line = to_line({"value": value})
    assert "\n" not in line
    json.loads(line, parse_constant=pytest.fail)  # strict JSON: no bare NaN
    assert_identical(from_line(line)["value"], value)


@pytest.mark.parametrize("key", ["$float", "$array", "$undefined", "$", "$$float"])
def test_marked_keys_of_the_user_are_kept(key: str) -> None:
    assert from_line(to_line({"value": {key: 1}})) == {"value": {key: 1}}


@pytest.mark.parametrize("value", [object(), {1: 2, "1": 3}, np.array(["a"]), 1j], ids=type)
def test_what_cannot_be_stored_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"can't be recorded|are the same"):
        to_line({"value": value})


def test_undefined_is_a_nan_that_keeps_its_reason() -> None:
    value = pickle.loads(pickle.dumps(Undefined("N = 1")))
    assert math.isnan(value)
    assert value.reason == "N = 1"
    assert math.isnan(np.mean([value, 1.0]))


def example() -> History:
    history = History(
        {
            "Loss": Source(("Loss",), View("Loss", "performance", "log", "loss")),
            "mine": Source(("X",), View("")),
        },
        {"0.weight": (3, 2), "0.bias": ()},
    )
    history.append(3, {"Loss": 1.5, "mine": {"a": np.arange(3), "b": [math.inf, Undefined("why")]}})
    history.append(10, {"Loss": math.nan})
    history.notes.append(Note(3, "something"))
    return history


def assert_same_history(found: History, expected: History) -> None:
    assert found.sources == expected.sources
    assert found.parameters == expected.parameters
    assert found.notes == expected.notes
    assert found.names == expected.names
    for name in expected.names:
        assert_identical(found[name], expected[name])


def test_write_and_load(tmp_path: Path) -> None:
    example().write(tmp_path / "run.jsonl")
    loaded = History.load(tmp_path / "run.jsonl")
    assert_same_history(loaded, example())
    assert not loaded.truncated
    assert loaded.steps == (3, 10)
    assert loaded.of_kind("X") == ("mine",)


@pytest.mark.slow
def test_every_truncation_of_a_run_loads(tmp_path: Path) -> None:
    example().write(tmp_path / "run.jsonl")
    content = (tmp_path / "run.jsonl").read_bytes()
    for length in range(1, len(content) + 1):
        (tmp_path / "cut.jsonl").write_bytes(content[:length])
        loaded = History.load(tmp_path / "cut.jsonl")
        # A line that lacks nothing but its line break is whole.
        whole_lines = content[: length + 1].count(b"\n")
        assert bool(loaded.sources) + len(loaded.notes) + len(loaded.steps) == whole_lines
        assert loaded.truncated == (b"\n" not in content[length - 1 : length + 1])
        assert not loaded.broken_lines


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"hello\n", b'{"a": 1}\n', b"[1]\n", b"\xff\xfe\x00", b"{}"], ids=repr
)
def test_file_that_is_no_run(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ValueError, match="other is not a gradlens run"):
        History.load(tmp_path / "other")


@pytest.mark.parametrize("line", ["nonsense", '{"step": 1}', "[]", "", "\ud800"])
def test_broken_line_in_the_middle_is_left_out(line: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    example().write(path)
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    broken = line.encode("utf-8", "surrogatepass") + b"\n"
    path.write_bytes(b"".join([first, second, broken, *rest, broken]))
    with pytest.warns(LeftOutWarning, match=r"run.jsonl: line 3 is broken \(.* as well as line 6$"):
        loaded = History.load(path)
    assert_same_history(loaded, example())
    assert list(loaded.broken_lines) == [3, 6]


@pytest.mark.parametrize("name", ["mine", "Loss"])
def test_a_run_that_goes_back_to_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Each series ends at its step of the checkpoint, and is empty if it had no value there."""
    path = tmp_path / "run.jsonl"
    history = example()
    history.coverages |= {2: Coverage(), 4: Coverage(samples=4)}
    history.write(path)
    with path.open("a") as file:
        file.write(to_line({"step": 3, "rewind": {name: 3}}) + "\n")
        file.write(to_line({"step": 5, "values": {"mine": 7.0}}) + "\n")
    loaded, before = History.load(path), example()
    kept = {step: value for step, value in before[name].items() if step <= 3}
    assert_identical(dict(loaded[name]), kept | ({5: 7.0} if name == "mine" else {}))
    assert loaded.names == before.names
    assert loaded.coverages == {2: Coverage()}
    assert {5} >= {step for each in loaded.names if each != name for step in loaded[each]}


@pytest.mark.parametrize("ends", [3, {"mine": None}, {"mine": "x"}, []])
def test_a_broken_step_back_changes_nothing(ends: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    example().write(path)
    with path.open("a") as file:
        file.write(to_line({"step": 3, "rewind": ends}) + "\n")
    with pytest.warns(LeftOutWarning, match="line 5 is broken"):
        assert_same_history(History.load(path), example())


def test_without_its_header_a_run_keeps_its_values(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    example().write(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"sources", b"sourcez", 1))
    text = r"line 1 is broken \(the header has no 'sources'\) and left out$"
    with pytest.warns(LeftOutWarning, match=text):
        loaded = History.load(path)
    assert (loaded.steps, loaded.notes, loaded.sources) == ((3, 10), example().notes, {})


def test_an_unknown_name_suggests_a_known_one() -> None:
    with pytest.raises(KeyError, match=r"no series 'Los' in this history: did you mean Loss\?"):
        example()["Los"]


def test_a_run_that_cannot_be_written_as_a_whole_leaves_nothing(tmp_path: Path) -> None:
    history = example()
    with pytest.raises(TypeError, match="can't be recorded"):
        history.append(11, {"Loss": 1.0, "mine": object()})
    assert history.steps == (3, 10)
    history.notes.append(Note(3, object()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="can't be recorded"):
        history.write(tmp_path / "run.jsonl")
    assert not [*tmp_path.iterdir()]


def test_folders_are_made(tmp_path: Path) -> None:
    example().write(tmp_path / "new" / "folder" / "run.jsonl")
    assert History.load(tmp_path / "new" / "folder" / "run.jsonl").steps == example().steps


KILLED = """
import sys, torch, gradlens
model = torch.nn.Linear(3, 2)
cockpit = gradlens.Cockpit(model, run=sys.argv[1])
for step in range(10**9):
    loss = model(torch.randn(4, 3)).square().mean()
    with cockpit(step, loss=loss):
        loss.backward()
    model.zero_grad()
    print(step, flush=True)
"""


@pytest.mark.slow
def test_killed_run_loses_at_most_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if int(line) >= 20:
                break
        process.send_signal(signal.SIGKILL)
        finished = max([20, *(int(line) for line in lines if line.endswith("\n"))])
    process.wait()
    history = History.load(path)
    assert set(history["NormTest"]) >= set(range(finished + 1))
    assert all(math.isfinite(value) for value in history["NormTest"].values())


def test_own_files_are_written_anew_and_others_kept(tmp_path: Path) -> None:
    files, path = OwnFiles(), tmp_path / "new" / "log.json"
    assert files.write(path, [b"1"]) == path
    assert files.write(path, [b"2"]) == path
    with pytest.warns(GradlensWarning, match=r"log\.json is another run's file and is kept"):
        other = OwnFiles().write(path, [b"3"])
    assert (path.read_bytes(), other.read_bytes()) == (b"2", b"3")
    with pytest.warns(GradlensWarning, match=r"this run is written to .*log-3\.json"):
        OwnFiles().write(path, [b"4"])
    contents = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert contents == {"log.json": b"2", "log-2.json": b"3", "log-3.json": b"4"}


def test_a_failed_write_keeps_the_earlier_file(tmp_path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield b"half"
        raise OSError("no space left")

    files, path = OwnFiles(), tmp_path / "log.json"
    with pytest.raises(OSError, match="no space"):
        files.write(path, failing())
    assert not [*tmp_path.iterdir()]
    files.write(path, [b"whole"])
    with pytest.raises(OSError, match="no space"):
        files.write(path, failing())
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"whole"]
