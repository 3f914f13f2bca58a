"""Tutorials and the page of questions: their parts, and that what they name exists.

The build of the documentation runs the code of all tutorials; here, that of one is run.
"""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gradlens.cli.main import _parser, main

DOCS = Path(__file__).parents[1] / "docs"
FAQ = (DOCS / "faq.rst").read_text("utf-8")
INDEX = (DOCS / "tutorials" / "index.rst").read_text("utf-8")
PAGES = {
    page.stem: page.read_text("utf-8")
    for page in sorted((DOCS / "tutorials").glob("*.rst"))
    if page.stem != "index"
}
CELL = re.compile(r"^\.\. cell::(.*)\n((?:   :.*\n)*)\n((?:   .*\n|\n)+)", re.MULTILINE)
PICTURE = re.compile(r"^\.\. picture:: (\w+)/(.+)\n((?:   :.*\n)+)\n(.*)", re.MULTILINE)
COMMAND = re.compile(r"^   \$ gradlens ((?:.+\\\n)*.+)$", re.MULTILINE)
NAME = re.compile(r"\bgradlens((?:\.\w+)+)")
ANSWER = re.compile(r"^(.+)\n~+\n\n((?:.*\n)+?)(?=.+\n[~-]{3}|\Z|\.\. _)", re.MULTILINE)


def test_each_page_is_in_the_index() -> None:
    assert sorted(re.findall(r"^   (\w+)$", INDEX, re.MULTILINE)) == sorted(PAGES)
    assert sorted(re.findall(r":doc:`(\w+)`", INDEX)) == sorted(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_beginning(page: str) -> None:
    beginning = PAGES[page].split("\n-----", 1)[0]
    for part in ("At the end of this page you ", ":You need:", ":It takes:"):
        assert part in beginning


@pytest.mark.parametrize("page", PAGES)
def test_pictures(page: str) -> None:
    """Each is drawn by a cell, described for those who don't see it, and explained."""
    text = PAGES[page]
    code = "".join(code for _, _, code in CELL.findall(text))
    found = PICTURE.findall(text)
    assert len(found) == text.count(".. picture::")
    for folder, name, options, below in found:
        assert folder == page
        assert name in code
        assert ":alt:" in options
        assert below.startswith("How to read it:")
    for _, options, code in CELL.findall(text):
        last = code.strip().splitlines()[-1]
        assert (":alt:" in options) == (".plot(" in last and "=" not in last.split("(")[0])


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_commands(page: str) -> None:
    for command in COMMAND.findall(PAGES[page]):
        _parser().parse_args(shlex.split(command.replace("\\\n", "")))


@pytest.mark.parametrize("page", [*PAGES, "faq"])
def test_names_exist(page: str) -> None:
    for names in {*NAME.findall(PAGES.get(page, FAQ))}:
        if ".integrations." in names:  # which import the libraries
            assert find_spec(f"gradlens{names}") is not None
            continue
        found: Any = import_module("gradlens")
        for name in names.removeprefix(".").split("."):
            try:
                found = getattr(found, name)
            except AttributeError:
                found = import_module(f"{found.__name__}.{name}")


def test_each_answer_has_a_link() -> None:
    found = ANSWER.findall(FAQ)
    assert len(found) == len(re.findall(r"^~+$", FAQ, re.MULTILINE))
    for question, answer in found:
        assert re.search(r":(doc|ref|class):`", answer), question


@pytest.mark.slow
def test_mislabelled_samples_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 90 wrong labels, most are among the first 90 samples."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, _, code in CELL.findall(PAGES["mislabelled"]):
        if kind.strip() == "console":
            command = COMMAND.findall(code)[0]
            assert main(shlex.split(command)) == 0
        elif ".imshow(" not in code:
            exec(dedent(code), names)
    shown = capsys.readouterr().out
    assert "label_noise" in shown
    found = re.search(r"among the first 90: (\d+) of the 90", shown)
    assert found is not None
    assert int(found[1]) > 60


def test_each_page_of_the_gallery_has_a_thumbnail() -> None:
    folder = DOCS / "gallery"
    index = (folder / "index.rst").read_text("utf-8")
    pages = {page.stem for page in folder.glob("*.rst")} - {"index"}
    assert pages == set(re.findall(r":target: (\w+)\.html", index))
