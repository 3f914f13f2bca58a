"""cockpit's quantities: gradlens's, with ``output`` and ``get_output``."""

from typing import Any

from gradlens import quantities
from gradlens.compat.cockpit.output import Output
from gradlens.schedules import EVERY_STEP, Schedule
from gradlens.spelling import unknown_name

NAMES = (
    *("Loss", "Parameters", "Distance", "UpdateSize", "GradNorm", "Time", "Alpha", "CABS"),
    *("EarlyStopping", "GradHist1d", "GradHist2d", "NormTest", "InnerTest", "OrthoTest"),
    *("HessMaxEV", "HessTrace", "TICDiag", "TICTrace", "MeanGSNR"),
)


class _HessMaxEV(quantities.HessMaxEV, Output):
    def __init__(
        self,
        track_schedule: Schedule = EVERY_STEP,
        verbose: bool = False,
        use_power: bool = True,  # chooses among methods that gradlens doesn't have
        **options: Any,
    ) -> None:
        del use_power
        super().__init__(track_schedule, verbose, **options)


def _bases(name: str) -> tuple[type, ...]:
    return (_HessMaxEV,) if name == "HessMaxEV" else (getattr(quantities, name), Output)


CLASSES: dict[str, Any] = {
    name: type(name, _bases(name), {"__module__": __name__}) for name in NAMES
}

__all__ = [*NAMES]


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return CLASSES[name]
    raise unknown_name(__name__, name, NAMES)
