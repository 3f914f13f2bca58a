"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gradlens

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
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
