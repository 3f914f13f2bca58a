"""What a cockpit tracks in a random training loop: quantities, their options and schedules."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradlens import Aggregate, configuration, quantities, schedules
from gradlens.quantities import Quantity

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Tracked:
    """A quantity by its class's name, or a preset as ``"preset: full"``.

    ``over`` is that of an ``Aggregate`` of it, which takes its place.
    """

    name: str
    options: Options = ()
    schedule: str = "every step"
    over: str | int = ""


SCHEDULES: dict[str, schedules.Schedule] = {
    "every step": schedules.linear(1),
    "every other step": schedules.linear(2),
    "odd steps": schedules.linear(2, 1),
    "third step": schedules.linear(100, 2),
    "never": schedules.linear(10**6, 10**6),
    "logarithmic": schedules.logarithmic(0, 2, steps=4),
    "epochs": schedules.epochs(2, 2),
    "irregular": lambda step: step % 5 in (0, 1, 3),
}

NAMES = [
    name
    for name, kind in vars(quantities).items()
    if isinstance(kind, type) and issubclass(kind, Quantity) and not name.endswith("Quantity")
]
SPECIAL: dict[str, tuple[Options, ...]] = {
    "DeadNeurons": ((), (("threshold", 0.1),)),
    "DirectionalDerivatives": ((("k", 2),),),
    "EarlyStopping": ((), (("epsilon", 1e-3),)),
    "GradCovariance": ((), (("k", 2),)),
    "GradHist1d": ((), (("bins", 5),), (("keep_individual", True),)),
    "GradHist2d": ((), (("bins", (3, 4)),), (("keep_individual", True),)),
    "GradientGeometry": ((), (("normalize", True),), (("correlation", False),)),
    "HessEigenvalues": ((), (("k", 2), ("which", "magnitude")), (("k", 1), ("by", "layer"))),
    "HessMaxEV": ((), (("tolerance", 0.03),)),
    "HessTrace": (
        (),
        (("curvature", "diag_ggn_exact"),),
        (("curvature", "diag_ggn_mc"), ("samples", 2)),
        (("curvature", "diag_ggn_mc"), ("samples", 1), ("sub_batch", 2)),
    ),
    "InputCovariance": ((), (("k", 2),)),
    "InputGradientGeometry": ((), (("normalize", True),)),
    "InputMean": ((), (("by_feature", True),)),
    "InputStd": ((), (("by_feature", True),)),
    "OutputGradientGeometry": ((), (("correlation", False),)),
    "OutputNorm": ((), (("normalize", True),)),
    "ParameterNorm": ((), (("normalize", True),)),
    "SpectralDensity": ((("probes", 1), ("steps", 5), ("points", 64)),),
    "TICDiag": ((), (("curvature", "diag_ggn_exact"),)),
    "TICTrace": ((), (("curvature", "diag_ggn_mc"), ("samples", 1))),
    "UpdateGeometry": ((), (("normalize", True),)),
}
OPTIONS: dict[str, tuple[Options, ...]] = dict.fromkeys(NAMES, ((),)) | SPECIAL
"""Options that are drawn for each quantity."""

PRESETS = ("economy", "business", "full", "training")


def draw(source: random.Random) -> tuple[Tracked, ...]:
    """A preset, or quantities of different names."""
    often = ["Loss", "GradNorm", "UpdateSize", "Distance", "ParameterNorm"]
    often += ["NormTest", "InnerTest", "OrthoTest", "GradNoiseScale", "GradCovariance"]
    if source.random() < 0.15:
        schedule = source.choice(["every step", "every step", "every other step"])
        return (Tracked(f"preset: {source.choice(PRESETS)}", (), schedule),)
    names = source.sample(sorted(OPTIONS), source.choice([1, 2, 3, 5, 8, len(OPTIONS)]))
    names += [name for name in source.sample(often, 4) if name not in names]
    return tuple(draw_one(source, name) for name in names)


def draw_one(source: random.Random, name: str) -> Tracked:
    schedule = "every step" if source.random() < 0.6 else source.choice(list(SCHEDULES))
    over: str | int = source.choice(["epoch", 2]) if source.random() < 0.05 else ""
    return Tracked(name, source.choice(OPTIONS[name]), schedule, over)


def build(tracked: Tracked) -> list[Quantity | Aggregate]:
    """New quantities, as they are described."""
    schedule = SCHEDULES[tracked.schedule]
    if tracked.name.startswith("preset: "):
        return list(configuration(tracked.name.removeprefix("preset: "), schedule))
    quantity: Quantity = getattr(quantities, tracked.name)(schedule, **dict(tracked.options))
    return [Aggregate(quantity, tracked.over, raw=True)] if tracked.over else [quantity]  # type: ignore[arg-type]


def suits(built: Quantity | Aggregate, model: nn.Module) -> bool:
    """Whether the model has layers or parameters of the kind that a quantity is about."""
    quantity = built.quantity if isinstance(built, Aggregate) else built
    try:
        quantity.choose(model, {n: p for n, p in model.named_parameters() if p.requires_grad})
    except ValueError:
        return False
    return True


def needs(tracked: Tracked) -> set[str]:
    """What the context has to be given."""
    built = [each.quantity if isinstance(each, Aggregate) else each for each in build(tracked)]
    return {needed for quantity in built for needed in quantity.needs}


def needs_model(tracked: Tracked) -> bool:
    """Whether it can't be tracked with parameters alone."""
    return tracked.name in OF_LAYERS


OF_LAYERS = {
    name for name in OPTIONS if issubclass(getattr(quantities, name), quantities.LayerQuantity)
}
