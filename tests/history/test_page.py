"""The lines of the page on a run's file that read it without gradlens."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gradlens import History, Undefined
from tests.cases.records import assert_identical
from tests.history.test_history import example

PAGE = Path(__file__).parents[2] / "docs" / "run-file.rst"


def plain(value: Any) -> Any:
    """A value without the reasons of NaNs, which the lines of the page don't read."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return float("nan") if isinstance(value, Undefined) else value


def test_twelve_lines_read_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r":name: without-gradlens\n\n(.*?)\n\n\S", PAGE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    code = textwrap.dedent(block[1])
    assert len([line for line in code.splitlines() if line]) == 12
    example().write(tmp_path / "run.jsonl")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    history = History.load("run.jsonl")
    assert [*names["values"]] == [*history]
    for step in history:
        found = names["values"][step]
        assert [*found] == [*history[step]]
        assert_identical(found, plain(history[step]))
