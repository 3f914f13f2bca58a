"""cockpit's quantities: gradlens's, with ``output`` and ``get_output``."""

from __future__ import annotations

from typing import Any, Protocol

from gradlens import quantities
from gradlens.compat.cockpit_log import series_of
from gradlens.history.history import History
from gradlens.schedules import EVERY_STEP, Schedule

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

NAMES = tuple(name for names in MODULES.values() for name in names)

OWN_QUANTITY = (
    "a quantity of your own derives from gradlens.quantities.SingleStepQuantity, names its "
    "reductions and defines compute(step) (docs/own-quantity.rst)"
)
NEVER_CALLED = ("_compute", "_compute_histogram", "track")
"""Methods of cockpit's quantities that are overridden there."""


class _HasHistory(Protocol):
    @property
    def history(self) -> History: ...


class Output:
    """Gives a quantity its values; it is the first base class of a gradlens quantity."""

    name: str
    _recorded_by: _HasHistory | None = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in NEVER_CALLED:
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name} is never called: {OWN_QUANTITY}")

    def read_from(self, cockpit: _HasHistory) -> None:
        """Called by the cockpit that the values are recorded by."""
        self._recorded_by = cockpit

    @property
    def output(self) -> dict[int, Any]:
        """The values so far by global step, in cockpit's form."""
        if self._recorded_by is None:
            return {}
        history = self._recorded_by.history
        return series_of(history, self.name) if self.name in history else {}

    def get_output(self) -> dict[int, Any]:
        """As ``output``."""
        return self.output


class HessMaxEV(quantities.HessMaxEV, Output):
    def __init__(
        self,
        track_schedule: Schedule | int = EVERY_STEP,
        verbose: bool = False,
        use_power: bool = True,  # chooses among methods that gradlens doesn't have
        **options: Any,
    ) -> None:
        del use_power
        super().__init__(track_schedule, verbose, **options)


CLASSES: dict[str, Any] = {
    "HessMaxEV": HessMaxEV,
    **{
        name: type(name, (getattr(quantities, name), Output), {"__module__": __name__})
        for name in NAMES
        if name != "HessMaxEV"
    },
}

__all__ = [*NAMES]


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
