"""Random training loops, with gradlens and without, and beside slow references.

``python -m benchmarks.fuzz`` runs as many as one likes.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.fuzz.examine import examine
from benchmarks.fuzz.loop import Loop
from benchmarks.fuzz.recipe import Recipe, recipe_of
from benchmarks.fuzz.tracked import Tracked
from benchmarks.fuzz.watch import CockpitWatch

pytestmark = [
    pytest.mark.slow,
    # Each loop records and compares its warnings itself.
    pytest.mark.filterwarnings("default"),
]


def of_one(name: str, **changes: object) -> Recipe:
    """A loop that tracks one quantity."""
    return Recipe(0, tracked=(Tracked(name),), **changes)  # type: ignore[arg-type]


MENDED = {
    "hooks on layers are removed without a trace": of_one("NormTest"),
    "one sample gives a trace without an interval": Recipe(0, tracked=(Tracked("preset: full"),)),
    "sparse gradients in products with the Hessian": of_one("TICDiag", entry="sparse words"),
    "a density without a second derivative": of_one("SpectralDensity", entry="largest of a bag"),
    "a budget without quantities": Recipe(
        0, sizes=(3,) * 4, ways=("plain",) * 4, options=("budget",)
    ),
    "backward on zero times the loss": of_one("GradNoiseScale", ways=("weighted by zero",) * 3),
    "complex gradients of real parameters": of_one("GradHist2d", parts=("fourier | rows",)),
    "hooks on parameters in passes with fixed statistics": of_one(
        "NormTest",
        parts=("batch norm",),
        habits=("hooks on parameters",),
        options=("batchnorm frozen",),
    ),
    "nested tensors": of_one("TICTrace", parts=("jagged",)),
    "anomaly mode in passes of gradlens": of_one(
        "HessEigenvalues", loss="distances", habits=("anomaly mode",)
    ),
    "a divided loss that isn't passed": Recipe(
        0,
        ways=("divided",) * 3,
        tracked=(Tracked("GradCovariance"), Tracked("GradNoiseScale"), Tracked("EarlyStopping")),
        options=("without loss",),
    ),
    "a step that is repeated without zeroed gradients": Recipe(
        0,
        ways=("plain", "plain", "raises and goes on"),
        habits=("gradients never zeroed",),
        tracked=(Tracked("ParameterNorm"), Tracked("Distance"), Tracked("GradNorm")),
    ),
    "scripted layers": of_one("NormTest", parts=("traced",)),
}


@pytest.mark.parametrize("name", MENDED)
def test_loops_that_were_wrong_once(name: str) -> None:
    assert not examine(MENDED[name])


def test_loops_that_differ_with_gradlens_alone_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(watch: CockpitWatch, loop: Loop) -> None:
        with torch.no_grad():
            loop.model.head.bias.add_(1)

    monkeypatch.setattr(CockpitWatch, "updated", change)
    assert examine(of_one("NormTest"))


@pytest.mark.parametrize("seed", range(40))
def test_random_loop(seed: int) -> None:
    """Nothing differs, nothing is wrong, and nothing is left behind."""
    assert not examine(recipe_of(seed)), recipe_of(seed)
