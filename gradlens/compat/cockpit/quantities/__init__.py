"""cockpit's quantities: gradlens's, with ``output`` and ``get_output``."""

from typing import Any

from gradlens import quantities
from gradlens.compat.cockpit.output import Output
from gradlens.spelling import unknown_name

NAMES = (
    *("Loss", "Parameters", "Distance", "UpdateSize", "GradNorm", "Time", "Alpha", "CABS"),
    *("EarlyStopping", "GradHist1d", "GradHist2d", "NormTest", "InnerTest", "OrthoTest"),
    *("HessMaxEV", "HessTrace", "TICDiag", "TICTrace", "MeanGSNR"),
)

CLASSES: dict[str, Any] = {
    name: type(name, (getattr(quantities, name), Output), {"__module__": __name__})
    for name in NAMES
}

__all__ = [*NAMES]


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return CLASSES[name]
    raise unknown_name(__name__, name, NAMES)
