"""``gradlens verify``, on scripts that run in processes forked from one that has torch."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradlens.cli.main import main
from gradlens.cli.text import as_line
from gradlens.cli.verify import Verdict, as_text, verify
from tests.cases import processes

assert (
    "gradlens.cockpit.cockpit" in processes.IMPORTED
)  # by the process that others are forked from

SCRIPT = """
import argparse, os, random, sys, time
import numpy, torch
from torch import nn
import gradlens

class Own(gradlens.quantities.Loss):
    def compute(self, step):
        {compute}
        return 0.0

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
{before}
quantities = [gradlens.quantities.NormTest(), Own(name="Own")]
cockpit = gradlens.Cockpit(model, quantities, run="own.jsonl")
for step in range(3):
    inputs, labels = torch.randn(6, 3), torch.randint(2, (6,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    {instead}
    with cockpit(step, loss=loss, optimizer=optimizer):
        loss.backward()
    {inside}
    optimizer.step()
cockpit.close()
{after}
"""


def forked(command: Sequence[str]) -> int:
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(command,))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(command: Sequence[str]) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    sys.argv = [*command]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def verified(
    folder: Path, *arguments: str, steps: int = 0, script: str = SCRIPT, **parts: str
) -> Verdict:
    """Of the script with such ``parts``."""
    texts = dict.fromkeys(("compute", "before", "instead", "inside", "after"), "pass") | parts
    path = folder / "train.py"
    path.write_text(script.format(**texts))
    return verify(path, arguments, steps, forked)


# The same bits ---------------------------------------------------------------------------------


def test_bits_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("RATE = 0.2")  # beside the script
    before = "import helper; optimizer.param_groups[0]['lr'] = helper.RATE * float(sys.argv[1])"
    # What needs recorded values isn't run where there are none.
    after = "assert cockpit.history['NormTest'][2] > 0"
    found = verified(tmp_path, "0.5", before=before, after=after)
    assert (found.difference, found.compared, found.coverage) == ("", 3, [1.0])
    assert found.seconds is not None
    assert min(found.seconds) > 0
    assert any("NormTest, Own" in line for line in found.tracked)
    assert not (tmp_path / "own.jsonl").exists()
    assert verified(tmp_path, "0.5", steps=2, before=before, after="1 / 0").compared == 2


CHANGES = {
    "draws of all generators": (
        "torch.rand(1), numpy.random.rand(), random.random()",
        "Python's random numbers, numpy's random numbers, torch's random numbers",
        1,
    ),
    "the last bit of a gradient": (
        "model[0].weight.grad.view(torch.int32)[1, 2] += step.global_step == 1",
        "gradient of 0.weight",
        2,
    ),
    "a buffer": ("model[1].running_mean += step.global_step == 2", "buffer 1.running_mean", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_found(change: str, tmp_path: Path) -> None:
    compute, what, step = CHANGES[change]
    found = verified(tmp_path, compute=compute)
    assert what in found.difference
    assert f"at optimizer step {step} of 3" in found.difference
    assert found.compared == step - 1
    assert found.seconds is None


# Refused --------------------------------------------------------------------------------------

PARSED = "p = argparse.ArgumentParser(); p.add_argument('--data', required=True); p.parse_args()"
BY_HAND = "loss.backward(); [p.data.sub_(p.grad) for p in model.parameters()]; continue"
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "arguments": ({"before": PARSED}, r"before any step.*exit code 2.*gradlens verify .*train.py"),
    "an exception": ({"inside": "1 / (1 - step)"}, r"after optimizer step 1 .*--steps 1"),
    "killed": ({"before": "os._exit(3)"}, "exit code 3"),
    "no cockpit": ({"before": "sys.exit()"}, "no gradlens.Cockpit"),
    "no optimizer": ({"instead": BY_HAND}, r"no step of a torch\.optim\.Optimizer"),
    "no context": ({"instead": "loss.backward(); optimizer.step(); continue"}, "nothing was track"),
    "with tracking alone": (
        {"inside": "assert step not in cockpit.history.steps"},
        r"with tracking \(AssertionError\), and not without",
    ),
    "without tracking alone": (
        {"inside": "assert step in cockpit.history.steps"},
        r"without tracking \(AssertionError\), and not with it",
    ),
    "other seeds": ({"before": "torch.manual_seed(time.time_ns())"}, "at optimizer step 1.*seeds"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_certified(case: str, tmp_path: Path) -> None:
    parts, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        verified(tmp_path, **parts)


# What is printed ------------------------------------------------------------------------------

FOUND = Verdict("train.py", 3, "", (0.3, 0.1), [0.5], ["tracked at 3 steps: Loss"])


@pytest.mark.parametrize("width", [20, 80])
def test_text(width: int) -> None:
    text = as_text(FOUND, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert words.startswith("train.py is bit-identical")
    assert "3.00 times the time, by 100 ms a step" in words
    changed = Verdict("train.py", 2, "buffer a, at optimizer step 3 of 3", None, [None], [])
    assert re.search("NOT bit-identical.*buffer a", " ".join(as_text(changed, width).split()))


def test_json() -> None:
    assert json.loads(as_line(FOUND))["seconds"] == [0.3, 0.1]


def test_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "train.py"), "--epochs", "1"]) == 1
    assert "there is no such script" in capsys.readouterr().err
