"""cockpit's quantities: gradlens's, with ``output`` and ``get_output``."""

from __future__ import annotations

import re
from typing import Any, Protocol

from gradlens import quantities
from gradlens.compat.cockpit_log import VIEWS, series_of
from gradlens.history.history import History
from gradlens.schedules import EVERY_STEP, Schedule

NAMES = (*VIEWS,)


def module_of(name: str) -> str:
    """The module that cockpit has for a class, such as ``grad_hist`` for ``GradHist1d``."""
    if name.startswith("TIC"):
        return "tic"
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", re.sub("[12]d$", "", name)).lower()


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
