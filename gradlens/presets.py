"""Sets of quantities by name."""

from __future__ import annotations

from typing import TypeAlias

from gradlens import quantities
from gradlens.quantities import Quantity
from gradlens.schedules import Schedule

_Classes: TypeAlias = tuple[type[Quantity], ...]

_ECONOMY: _Classes = (
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
_BUSINESS: _Classes = (
    *_ECONOMY,
    quantities.MeanGSNR,
    quantities.GradCovariance,
    quantities.TICDiag,
    quantities.HessTrace,
)
_FULL: _Classes = (*_BUSINESS, quantities.HessMaxEV, quantities.GradHist2d)

PRESETS: dict[str, _Classes] = {
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
    return [quantity(track_schedule, verbose) for quantity in PRESETS[label]]
