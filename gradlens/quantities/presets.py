"""Sets of quantities by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from gradlens import quantities
from gradlens.quantities import Quantity
from gradlens.schedules import EVERY_STEP, Schedule

_Builders: TypeAlias = tuple[Callable[..., Quantity], ...]

_ECONOMY: _Builders = (
    quantities.Loss,
    quantities.Time,
    quantities.GradNorm,
    quantities.NormTest,
    quantities.InnerTest,
    quantities.OrthoTest,
    quantities.GradHist1d,
    quantities.Alpha,
    quantities.Distance,
    quantities.UpdateSize,
)
# An exact diagonal takes some twenty training steps, a sampled trace less than one. A sampled
# diagonal would be too noisy to divide by, so that there is no TICDiag.
_BUSINESS: _Builders = (
    *_ECONOMY,
    quantities.MeanGSNR,
    quantities.GradCovariance,
    partial(quantities.TICTrace, curvature="diag_ggn_mc", samples=1, sub_batch=32),
    partial(quantities.HessTrace, curvature="diag_ggn_mc", samples=1, sub_batch=32),
)
_FULL: _Builders = (
    *_BUSINESS,
    partial(quantities.HessMaxEV, tolerance=0.03, explore_every=20),
    quantities.GradHist2d,
)

PRESETS: dict[str, _Builders] = {
    "economy": _ECONOMY,
    "business": _BUSINESS,
    "full": _FULL,
}


def configuration(
    label: str, track_schedule: Schedule | None = None, verbose: bool = False
) -> list[Quantity]:
    """The quantities of a preset, ``"economy"``, ``"business"`` or ``"full"``, on one schedule.

    By default they are tracked at every step. ``ValueError`` for any other label.
    """
    if label not in PRESETS:
        known = ", ".join(repr(name) for name in PRESETS)
        raise ValueError(f"no preset is called {label!r}: choose one of {known}")
    schedule = EVERY_STEP if track_schedule is None else track_schedule
    return [quantity(schedule, verbose) for quantity in PRESETS[label]]
