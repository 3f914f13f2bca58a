"""cockpit's quantities: gradlens's, with ``output`` and ``get_output``."""

from functools import partial
from typing import Any

from gradlens import quantities
from gradlens.compat.cockpit.output import OWN_QUANTITY, Output
from gradlens.compat.cockpit.replaced import add_modules, replaced
from gradlens.schedules import EVERY_STEP, Schedule

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
    raise replaced(__name__, name, {})


def _class_of_module(names: tuple[str, ...], name: str) -> Any:
    if name in names:
        return CLASSES[name]
    raise replaced(__name__, name, {})


def _replaced_by(module: str, instead: str, name: str) -> Any:
    if name.startswith("__"):  # what Python itself looks for
        raise AttributeError(name)
    raise replaced(f"{__name__}.{module}", name, {name: instead})


MODULES = {
    "alpha": ("Alpha",),
    "cabs": ("CABS",),
    "distance": ("Distance",),
    "early_stopping": ("EarlyStopping",),
    "grad_hist": ("GradHist1d", "GradHist2d"),
    "grad_norm": ("GradNorm",),
    "hess_max_ev": ("HessMaxEV",),
    "hess_trace": ("HessTrace",),
    "inner_test": ("InnerTest",),
    "loss": ("Loss",),
    "mean_gsnr": ("MeanGSNR",),
    "norm_test": ("NormTest",),
    "ortho_test": ("OrthoTest",),
    "parameters": ("Parameters",),
    "tic": ("TICDiag", "TICTrace"),
    "time": ("Time",),
    "update_size": ("UpdateSize",),
}
"""The modules that cockpit has for its classes."""

REPLACED = {
    "hooks": "a reduction of your own (docs/own-quantity.rst)",
    "utils_hists": "numpy.histogramdd, or the counts of GradHist1d and GradHist2d",
    "utils_quantities": f"torch's own functions: {OWN_QUANTITY}",
    "utils_transforms": "reductions: gradients have no grad_batch_transforms "
    "(docs/own-quantity.rst)",
}
"""Other modules, with what takes the place of their names."""

add_modules(
    __name__,
    {module: partial(_class_of_module, names) for module, names in MODULES.items()}
    | {module: partial(_replaced_by, module, instead) for module, instead in REPLACED.items()},
)
