"""cockpit's presets, as they are there: those of ``gradlens.configuration`` have more, for less."""

from __future__ import annotations

from gradlens.compat.cockpit import quantities
from gradlens.quantities.quantity import Quantity
from gradlens.schedules import EVERY_STEP, Schedule
from gradlens.spelling import near

_ECONOMY = (
    *("Alpha", "Distance", "GradHist1d", "GradNorm", "InnerTest"),
    *("Loss", "NormTest", "OrthoTest", "UpdateSize"),
)
_BUSINESS = (*_ECONOMY, "TICDiag", "HessTrace")
_FULL = (*_BUSINESS, "HessMaxEV", "GradHist2d")

PRESETS = {"economy": _ECONOMY, "business": _BUSINESS, "full": _FULL}
"""Names of the quantities of each preset."""


def configuration(
    label: str, track_schedule: Schedule | int | None = None, verbose: bool = False
) -> list[Quantity]:
    """The quantities of a preset, on one schedule, by default at every step."""
    schedule = EVERY_STEP if track_schedule is None else track_schedule
    return [quantity(schedule, verbose) for quantity in quantities_cls_for_configuration(label)]


def quantities_cls_for_configuration(label: str) -> list[type[Quantity]]:
    """The classes of a preset's quantities; ``ValueError`` for a label that isn't a preset's."""
    if label not in PRESETS:
        raise ValueError(f"no configuration is called {label!r}{near(label, PRESETS)}")
    return [getattr(quantities, name) for name in PRESETS[label]]
