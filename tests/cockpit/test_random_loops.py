"""Random training loops, with gradlens and without, and beside slow references.

``python -m benchmarks.fuzz`` runs as many as one likes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.fuzz.examine import examine
from benchmarks.fuzz.loop import Loop, run
from benchmarks.fuzz.parts import LAYERS, RARE
from benchmarks.fuzz.recipe import BETWEEN, HABITS, WAYS, Recipe, recipe_of, sensible
from benchmarks.fuzz.tracked import NAMES, OF_LAYERS, PRESETS, Tracked
from benchmarks.fuzz.watch import CockpitWatch
from gradlens import quantities
from gradlens.quantities.parameter_quantity import OfParameters

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


EVERY = tuple(map(Tracked, NAMES))
OF_PARAMETERS = {name for name in NAMES if issubclass(getattr(quantities, name), OfParameters)}
GIVEN = ("optimizer", "loss function")
TOGETHER = {
    "of a convolution": Recipe(
        0,
        entry="convolution, batch norm",
        parts=("alpha dropout", "in turns"),
        optimizer="adam",
        tracked=EVERY,
        options=GIVEN,
    ),
    "of an encoder": Recipe(
        0, entry="encoder", parts=("dropout in place",), tracked=EVERY, options=GIVEN
    ),
    **{
        f"of odd layers in {precision}": Recipe(
            0,
            entry="sparse words",
            parts=("complex", "scalar", "empty parameter", "unused parameter", "without a gradient",
                   "every other call", "dict of outputs"),
            precision=precision,
            sizes=(1, 0, 3),
            tracked=tuple(Tracked(name) for name in sorted(OF_LAYERS | OF_PARAMETERS)),
            options=GIVEN,
        )
        for precision in ("float32", "bfloat16")
    },
    **{
        f"of the preset {name}": Recipe(
            0,
            entry="convolution, batch norm",
            sizes=(3,) * 6,
            ways=("plain", "accumulated", "raises after", "raises in backward", "interrupted",
                  "plain"),
            tracked=(Tracked(f"preset: {name}"),),
            options=GIVEN,
        )
        for name in PRESETS
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_all_quantities(name: str) -> None:
    assert not examine(TOGETHER[name])


def test_loops_that_differ_with_gradlens_alone_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(watch: CockpitWatch, loop: Loop) -> None:
        with torch.no_grad():
            loop.model.head.bias.add_(1)

    monkeypatch.setattr(CockpitWatch, "updated", change)
    assert examine(of_one("NormTest"))


VALUES = (
    *("Loss", "NormTest", "InnerTest", "OrthoTest", "GradCovariance", "GradNorm", "GradHist1d"),
    *("UpdateSize", "Alpha", "OutputNorm"),
)
IN_CHECKPOINTS = (
    "spectral norm", "spectral norm by a hook", "changing buffer", "replaced buffer", "batch norm",
)  # fmt: skip
EACH: dict[str, dict[str, Any]] = {
    **{f"trained: {name}": {"ways": (name,) * 3} for name in WAYS},
    **{f"habit: {name}": {"habits": (name,)} for name in HABITS},
    **{f"between steps: {name}": {"between": (name,)} for name in BETWEEN},
    **{f"layer: {name}": {"parts": (name,)} for name in LAYERS if name not in RARE},
    **{f"in a checkpoint: {n}": {"parts": (f"{n} | checkpointed",)} for n in IN_CHECKPOINTS},
    "micro-batches with steps of their own": {
        "ways": ("scaled",) * 3, "habits": ("gradients never zeroed",)
    },
    **{
        f"parameters of a network that is {extended}": {
            "entry": "perceptron",
            "tracked": (*map(Tracked, VALUES), Tracked("HessMaxEV")),
            "options": ("parameters alone", extended, "batch size"),
        }
        for extended in ("extended", "extended by BackPACK")
    },
}  # fmt: skip
"""What a loop has of each kind, alone."""

UNKNOWN = {
    "trained: backward twice", "trained: grad before", "trained: penalised", "trained: two losses",
    "trained: two losses one passed", "trained: vector", "trained: without backward",
    "trained: hooked outputs", "trained: weighted by zero", "trained: detached", "layer: jagged",
    "layer: overwriting function", "layer: function with a list", "layer: not finite",
    "in a checkpoint: spectral norm", "in a checkpoint: spectral norm by a hook",
}  # fmt: skip
"""Where norms of single samples' gradients are unknown at some step."""


@pytest.mark.parametrize("name", EACH)
def test_each_way_habit_and_layer(name: str) -> None:
    """As random loops, and values of single samples are known."""
    usual = {"tracked": tuple(map(Tracked, VALUES)), "options": GIVEN}
    recipe = sensible(Recipe(0, **usual | EACH[name]))
    assert not examine(recipe)
    watch = CockpitWatch()
    run(recipe, watch)
    values = watch.history["NormTest"].values()
    assert all(value > 0 for value in values) == (name not in UNKNOWN), [*values]


@pytest.mark.parametrize("seed", range(40))
def test_random_loop(seed: int) -> None:
    """Nothing differs, nothing is wrong, and nothing is left behind."""
    assert not examine(recipe_of(seed)), recipe_of(seed)
