"""Whatever a file holds, a command ends soon, in bounded memory, with at most one line of error."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradlens.cli.main import main
from gradlens.history.json_lines import to_line
from gradlens.history.records import ARRAYS, Samples
from gradlens.history.spikes import Spike
from tests.cases.mutated_runs import (
    BOMB,
    BOMB_OF_ZEROS,
    array,
    base_runs,
    bombs,
    dumped,
    many_series,
    mutated,
    mutated_log,
)

SECONDS = 10
MEGABYTES = 500

HEADER = '{"gradlens_run":1,"sources":{},"parameters":{}}'


def stored(found: Any) -> Any:
    """What JSON has for the values of a record."""
    return json.loads(to_line(found))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return base_runs(tmp_path_factory.mktemp("runs"))


def check(command: str, path: Path, capsys: pytest.CaptureFixture[str], case: object) -> str:
    """Call a command on a file; what it printed on stderr, which is one line if it failed."""
    out = path.with_suffix(".png")
    commands = {
        "summary": ["summary", path],
        "plot": ["plot", path, "-o", out],
        "layers": ["plot", path, "--layers", "--log-steps", "-o", out],
        "compare": ["compare", path, path.parent / "other.jsonl", "-o", out],
    }
    start = time.process_time()
    code = main([str(argument) for argument in commands[command]])
    assert time.process_time() - start < SECONDS, case
    error = capsys.readouterr().err
    assert code == (1 if error else 0), case
    assert len(error.splitlines()) == code, case
    assert len(error) < 1500, case
    assert not error or path.name in error, case
    return error


@pytest.mark.slow
def test_summaries_of_mutated_files(
    runs: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, errors = tmp_path / "run.jsonl", set()
    for seed in range(200):
        name, content = mutated(runs, seed)
        path.write_bytes(content)
        errors.add(check("summary", path, capsys, (seed, name)))
    assert len(errors) > 100


@pytest.mark.slow
def test_mutated_logs_of_cockpit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Path(__file__).parents[1] / "compat" / "data" / "cockpit_1.0.2.json"
    path, content = tmp_path / "run.json", log.read_bytes()
    for seed in range(50):
        path.write_bytes(mutated_log(content, seed))
        check("plot" if seed % 10 == 0 else "summary", path, capsys, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "first"), [("plot", 1000), ("layers", 1008), ("compare", 1016)]
)
def test_figures_of_mutated_files(
    command: str, first: int, runs: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    (tmp_path / "other.jsonl").write_bytes(runs[0])
    for seed in range(first, first + 8):
        name, content = mutated(runs, seed)
        path.write_bytes(content)
        check(command, path, capsys, (seed, name))


SPIKE = stored(Spike(9.0, 1.0, 0.1, 2.0))
COLUMNS = {name: np.zeros(0, kind) for name, kind in ARRAYS.items()}
SAMPLES = stored(Samples(1, (), **COLUMNS))
CRAFTED: dict[str, str] = {
    "a list for a record": "[1]",
    "a list of values": '{"step":1,"values":[1]}',
    "no values": '{"step":1}',
    "a step of text": '{"step":"1","values":{}}',
    "a huge step": f'{{"step":{10**30},"values":{{}}}}',
    "a true step": '{"step":true,"values":{}}',
    "NaN": '{"step":1,"values":{"a":NaN}}',
    "digits": f'{{"step":1,"values":{{"a":{"1" * 10_000}}}}}',
    "depth": "[" * 100_000,
    "a bomb": dumped({"step": 1, "values": {"a": BOMB}}),
    "a bomb of zeros": dumped({"step": 1, "values": {"a": BOMB_OF_ZEROS}}),
    "a shape": dumped({"step": 1, "values": {"a": array("<f8", [-1], b"")}}),
    "objects": dumped({"step": 1, "values": {"a": array("O", [1], b"x" * 8)}}),
    "a short array": dumped({"step": 1, "values": {"a": array("<f8", [9], b"x")}}),
    "a note of numbers": '{"step":1,"note":3}',
    "coverage": '{"step":1,"coverage":{"missing":[]}}',
    "a spike": '{"step":1,"spike":{}}',
    "a spike of a list": '{"step":1,"spike":[]}',
    "a spike without a step": '{"spike":{}}',
    "a suspect": dumped({"step": 1, "spike": {**SPIKE, "suspects": [{"index": "a"}]}}),
    "an origin": dumped({"step": 1, "spike": {**SPIKE, "origin": "x"}}),
    "samples": '{"step":1,"samples":{"ids":3}}',
    "samples of other shapes": dumped({"step": 1, "samples": {**SAMPLES, "ids": [1, 2]}}),
    "samples of a text": dumped({"step": 1, "samples": {**SAMPLES, "visits": "x"}}),
    "a sample twice": dumped({"step": 1, "samples": {**SAMPLES, "ids": [1, 1]}}),
    "a sample without a name": dumped({"step": 1, "samples": {**SAMPLES, "ids": [1.5]}}),
    "a header": '{"gradlens_run":1,"sources":{"a":1}}',
    "another format": '{"gradlens_run":2}',
    "bytes": "\x00\x01",
}


@pytest.mark.parametrize("case", CRAFTED)
def test_what_is_wrong_is_said(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    step = json.dumps({"step": 7, "values": {"Loss": 1.0}})
    path.write_text(f"{HEADER}\n{CRAFTED[case]}\n{step}\n")
    error = check("summary", path, capsys, case)
    assert error.startswith(f"gradlens: {path}")
    assert re.search(r"line 2(: the run has format 2| is broken \(.{9,})", error)


def test_the_rest_of_a_damaged_run_is_drawn(
    runs: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    header, first, *rest = runs[0].splitlines(keepends=True)
    path.write_bytes(b"".join([header, first[:5] + b"?" + first[6:], *rest]))
    assert main(["summary", str(path)]) == 1
    printed = capsys.readouterr()
    assert "steps, " in printed.out
    assert "line 2 is broken" in printed.err
    assert main(["plot", str(path), "-o", str(tmp_path / "a.png")]) == 1
    assert (tmp_path / "a.png").exists()


LIMITED = """
import resource, sys
from gradlens.cli.main import main
import matplotlib.figure, gradlens.cli.commands
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * 2**20,) * 2)
sys.exit(sum(main(["plot", path]) for path in sys.argv[2:]))
"""


@pytest.mark.slow
def test_in_a_process_with_little_memory(runs: list[bytes], tmp_path: Path) -> None:
    paths = []
    for seed, mutation in {0: bombs, 1: many_series, 3: bombs}.items():
        paths.append(tmp_path / f"run{seed}.jsonl")
        paths[-1].write_bytes(mutation(runs[seed], random.Random(seed)))
    command = [sys.executable, "-c", LIMITED, str(MEGABYTES), *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    errors = result.stderr.splitlines()
    assert result.returncode == len(errors)
    assert all(sum(path.name in each for path in paths) == 1 for each in errors)
    assert all(sum(path.name in each for each in errors) <= 1 for path in paths)
