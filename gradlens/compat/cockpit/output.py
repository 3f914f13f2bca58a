"""What the quantities of this package have besides gradlens's: their own values."""

from __future__ import annotations

from typing import Any, Protocol

from gradlens.compat.cockpit.values import series_of
from gradlens.history.history import History


class _HasHistory(Protocol):
    @property
    def history(self) -> History: ...


class Output:
    """Gives a quantity its values; it is the first base class of a gradlens quantity."""

    name: str
    _recorded_by: _HasHistory | None = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in REPLACED:
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name} is never called: {REPLACED[name]}")

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


OWN_QUANTITY = (
    "a quantity of your own derives from gradlens.quantities.SingleStepQuantity, names its "
    "reductions and defines compute(step) (docs/own-quantity.rst)"
)
REPLACED = dict.fromkeys(("_compute", "_compute_histogram", "track"), OWN_QUANTITY)
"""Methods of cockpit's quantities that are overridden there, with what takes their place."""
