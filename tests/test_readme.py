"""What the README and the pages show works as it stands there."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import gradlens
from gradlens.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    name: (ROOT / "docs" / f"{name}.rst").read_text(encoding="utf-8")
    for name in ("index", "quickstart", "choosing")
}
PAGE = PAGES["quickstart"]
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart = BLOCKS[0]
    assert len(quickstart.splitlines()) <= 15
    monkeypatch.chdir(tmp_path)
    exec(quickstart, {})
    assert (tmp_path / "cockpit.png").read_bytes().startswith(b"\x89PNG")
    assert gradlens.History.load(tmp_path / "run.jsonl").steps == tuple(range(100))


def test_per_sample_gradients_and_own_quantity() -> None:
    names: dict[str, Any] = {
        "gradlens": gradlens,
        "model": torch.nn.Sequential(torch.nn.Linear(3, 2)),
        "loss_fn": torch.nn.CrossEntropyLoss(),
        "x": torch.randn(4, 3),
        "y": torch.tensor([0, 1, 1, 0]),
    }
    for block in BLOCKS[1:]:
        exec(block, names)
    cockpit = gradlens.Cockpit(names["model"], [names["LargestNorm"]()])
    with cockpit(0):
        names["loss_fn"](names["model"](names["x"]), names["y"]).backward()
    largest = names["g"]["0.weight"].squared_norms() + names["g"]["0.bias"].squared_norms()
    assert cockpit.history["LargestNorm"][0] == pytest.approx(largest.max().sqrt().item())


def test_the_home_page_shows_what_its_loop_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = (
        re.search(rf"\.\. test{kind}::\n\n(.*?)\n\n(?=\S)", PAGES["index"], flags=re.DOTALL)
        for kind in ("code", "output")
    )
    assert code is not None
    assert output is not None
    exec(textwrap.dedent(code[1]), {})
    assert capsys.readouterr().out.strip() == textwrap.dedent(output[1]).strip()


@pytest.mark.slow
def test_the_first_loop_of_the_quickstart_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.search(r"\.\. testcode::\n\n(.*?)\n\n\.\.", PAGES["quickstart"], flags=re.DOTALL)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    exec(textwrap.dedent(found[1]), {})
    assert (tmp_path / "cockpit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_commands_of_the_quickstart_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo, *others = re.findall(r"^   gradlens (.+)$", PAGE, flags=re.MULTILINE)
    assert main([demo, "--steps", "2"]) == 0
    assert others
    for command in others:
        assert main(shlex.split(command)) == 0


@pytest.mark.parametrize(
    "code",
    re.findall(
        r"^     - (?:only that quantity: )?``((?:Cockpit|configuration|\[).*?)``",
        PAGES["choosing"],
        re.MULTILINE,
    ),
)
def test_what_to_pass_for_what_is_wanted(code: str) -> None:
    model = torch.nn.Linear(3, 2)
    imports = re.search(r"^   (from gradlens import .*)$", PAGES["choosing"], re.MULTILINE)
    assert imports is not None
    names: dict[str, Any] = {"model": model}
    exec(imports[1], names)
    found = eval(code, names)
    cockpit = found if isinstance(found, gradlens.Cockpit) else gradlens.Cockpit(model, found)
    cockpit.close()
