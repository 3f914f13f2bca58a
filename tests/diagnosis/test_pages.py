"""Pages of faults: each rule has one, and what they show works."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from gradlens.cli.main import main
from gradlens.diagnosis.rules import RULES

FOLDER = Path(__file__).parents[2] / "docs" / "diagnosis"
INDEX = (FOLDER / "index.rst").read_text("utf-8")
SYMPTOMS = FOLDER / "loss-does-not-go-down.rst"
FAULTS = {rule.fault for rule in RULES}
README = (FOLDER.parents[1] / "README.md").read_text("utf-8")
HEADINGS = ["What it looks like", "Why it happens", "What to do", "How gradlens finds it"]


def blocks(directive: str) -> list[str]:
    """The indented blocks under a directive of the page on diagnosis."""
    found = re.findall(rf"^\.\. {directive}::.*\n\n((?:   .*\n|\n)+)", INDEX, re.M)
    return [textwrap.dedent(block).strip() for block in found]


@pytest.fixture
def codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs of the page, to run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    return blocks("testcode")


def test_each_rule_has_a_page_and_each_page_a_rule() -> None:
    pages = {page.stem for page in FOLDER.glob("*.rst")}
    assert pages - {"index", SYMPTOMS.stem} == FAULTS


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_page_has_all_parts(fault: str) -> None:
    text = (FOLDER / f"{fault}.rst").read_text("utf-8")
    assert re.findall(r"^(.+)\n-+$", text, flags=re.M) == HEADINGS


def test_each_fault_is_where_readers_look() -> None:
    listed = re.findall(r"^   ([a-z_]+)$", INDEX, flags=re.M)
    assert sorted(listed) == sorted(FAULTS)
    assert f"each of the {len(FAULTS)} faults" in " ".join(INDEX.split())
    assert set(re.findall(r"<([a-z_]+)>`", SYMPTOMS.read_text("utf-8"))) == FAULTS


def test_page_works_as_it_stands(codes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    outputs, names = blocks("testoutput"), dict[str, object]()
    for code, output in zip(codes, outputs, strict=True):
        exec(code, names)
        assert capsys.readouterr().out.strip() == output


def test_terminal_shows_what_the_page_says(
    codes: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exec(codes[0], {})
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["diagnose", "run.jsonl"]) == 0
    in_readme = re.search(r"```console\n(\$ gradlens diagnose.*?)```", README, re.DOTALL)
    assert in_readme is not None
    command, shown = blocks("code-block")[0].split("\n", 1)
    assert command == "$ gradlens diagnose run.jsonl"
    assert shown.strip() == capsys.readouterr().out.strip()
    assert f"{command}\n{shown}".startswith(in_readme[1].strip())
