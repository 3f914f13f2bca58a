"""Which quantities cost so little that a budget doesn't thin them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gradlens.quantities.quantity import Phase, Quantity
from gradlens.stateful import State


class NegligibleCosts:
    """Measures quantities that are computed within a context alone, and changes no backward pass.

    Their time is that of their own work, which can be measured directly, without the noise of a
    training step. Of all measurements the least counts, since other programs on the machine only
    make work slower.
    """

    def __init__(self, quantities: Iterable[Quantity]) -> None:
        self._seconds: dict[str, float | None] = {
            quantity.name: None for quantity in quantities if _is_computed_in_context(quantity)
        }

    def measure(self, name: str, seconds: float) -> None:
        """A quantity has taken so many seconds at a step."""
        if name in self._seconds:
            before = self._seconds[name]
            self._seconds[name] = seconds if before is None else min(before, seconds)

    def of(self, name: str) -> float:
        """The seconds of a quantity; 0 before it was measured."""
        return self._seconds[name] or 0.0

    def within(self, most: float) -> frozenset[str]:
        """The cheapest quantities, which take at most so many seconds together.

        What hasn't been measured counts as nothing.
        """
        total, found = 0.0, []
        for name, seconds in sorted(self._seconds.items(), key=lambda item: item[1] or 0.0):
            total += seconds or 0.0
            if total > most:
                break
            found.append(name)
        return frozenset(found)

    def state_dict(self) -> State:
        """What was measured."""
        return dict(self._seconds)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._seconds = dict(state)


def _is_computed_in_context(quantity: Quantity) -> bool:
    return tuple(quantity.phases) == (Phase.AFTER_BACKWARD,) and not quantity.may_need_graph
