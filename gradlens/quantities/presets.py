"""Sets of quantities by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import isabstract
from typing import TypeAlias

from gradlens import quantities
from gradlens.quantities import Quantity
from gradlens.schedules import EVERY_STEP, Schedule
from gradlens.spelling import near

_Builders: TypeAlias = tuple[Callable[..., Quantity], ...]

_ECONOMY: _Builders = (
    *(quantities.Loss, quantities.Time, quantities.GradNorm, quantities.NormTest),
    *(quantities.InnerTest, quantities.OrthoTest, quantities.GradHist1d, quantities.Alpha),
    *(quantities.Distance, quantities.UpdateSize),
)
# An exact diagonal costs as much as twenty plain training steps, a sampled trace less than one.
# TICDiag is left out: it divides by the elements of the diagonal, which sampling makes too noisy.
_BUSINESS: _Builders = (
    *_ECONOMY,
    quantities.MeanGSNR,
    quantities.GradCovariance,
    partial(quantities.TICTrace, curvature="diag_ggn_mc", samples=1, sub_batch=32),
    partial(quantities.HessTrace, curvature="diag_ggn_mc", samples=1, sub_batch=32),
)
# The costs with these options and others are compared in docs/quantities.rst.
_FULL: _Builders = (
    *_BUSINESS,
    partial(quantities.HessMaxEV, tolerance=0.03, search_interval=10),
    quantities.GradHist2d,
)

# For large models: each step costs at most a twentieth of a plain one and no copies of parameters,
# and compiled code is never left. On GPT-2 small (docs/overhead.rst), norms of all gradients cost
# one to two hundredths of a step. UpdateSize and RelativeUpdate are left out, since they copy the
# parameters; OptimizerState, WeightSpectrum and UpdateSpectrum, since they take a tenth of a step
# or more; and ActivationOutliers, OutputEntropy, AttentionLogits and AttentionEntropy, since
# forward passes can't run compiled with hooks on layers: add them every hundred steps or so.
_TRAINING: _Builders = (
    *(quantities.Loss, quantities.Time, quantities.GradNorm, quantities.ClippedGradNorm),
    partial(quantities.GradNoiseScale, between="parts", smoothing=0.99),
)

PRESETS: dict[str, _Builders] = {
    "economy": _ECONOMY,
    "business": _BUSINESS,
    "full": _FULL,
    "training": _TRAINING,
}


def configuration(
    label: str, track_schedule: Schedule | int | None = None, verbose: bool = False
) -> list[Quantity]:
    """The quantities of a preset on one schedule.

    It is ``"economy"``, ``"business"``, ``"full"``, or ``"training"`` for large models.

    By default, they are tracked at every step. The label is case-insensitive. ``ValueError`` for
    any other label suggests the nearest one.
    """
    preset = PRESETS.get(label.lower()) if isinstance(label, str) else None
    if preset is None:
        raise ValueError(f"no preset is called {label!r}{near(label, PRESETS)}")
    schedule = EVERY_STEP if track_schedule is None else track_schedule
    return [build(schedule, verbose) for build in preset]


def named(name: str) -> Quantity:
    """The quantity of this class with its default options; ``ValueError`` suggests a name."""
    found = getattr(quantities, name, None) if name in quantities.__all__ else None
    if found is None or isabstract(found) or not issubclass(found, Quantity):
        raise ValueError(f"no quantity is called {name!r}{near(name, quantities.__all__)}")
    return found()
