"""The results of a backward pass: one operator for each use of a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradlens.per_sample.operators.operator import GradientOperator
from gradlens.per_sample.operators.summed import summed


class Collector:
    """Operators by parameter and backward pass, appended to as nodes are reached.

    A gradient that the user asks for inside the context, without accumulating it into the
    parameters, must not be mixed with the one that is, so each backward pass is kept apart.
    ``unavailable`` are the reasons why parameters have no operator.
    """

    def __init__(self, unavailable: Mapping[str, str]) -> None:
        self.unavailable = dict(unavailable)
        self._uses: dict[str, dict[int, list[GradientOperator]]] = {}

    def receive(self, name: str, backward_pass: int, operator: GradientOperator) -> None:
        """Add one use of a parameter."""
        self._uses.setdefault(name, {}).setdefault(backward_pass, []).append(operator)

    def refuse(self, name: str, reason: str) -> None:
        """Refuse a parameter's gradients, for a reason."""
        self.unavailable[name] = reason

    def refuse_all(self, names: Iterable[str], reason: str) -> None:
        """Refuse several parameters' gradients, for the same reason."""
        self.unavailable |= dict.fromkeys(names, reason)

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that have operators."""
        return tuple(self._uses)

    def latest_pass(self, name: str) -> int:
        """The last backward pass that has reached a parameter."""
        return max(self._uses[name])

    def take(self, name: str, backward_pass: int | None = None) -> GradientOperator | None:
        """Remove and return a parameter's operator, its uses in one or all passes added up."""
        passes = self._uses.get(name, {})
        if backward_pass is not None and backward_pass not in passes:
            return None
        self.drop(name)
        wanted = passes if backward_pass is None else [backward_pass]
        uses = [use for number in wanted for use in passes[number]]
        if not all(use.is_unchanged for use in uses):
            self.refuse(name, OVERWRITTEN)
        return summed(uses) if uses and name not in self.unavailable else None

    def drop(self, name: str) -> None:
        """Release a parameter's operators."""
        self._uses.pop(name, None)

    def clear(self) -> None:
        """Release all operators."""
        self._uses.clear()


OVERWRITTEN = (
    "what its per-sample gradients are computed from was overwritten before they were used: an "
    "input of the model by the next one, or a gradient by a backward function of your own. Make "
    "a new tensor for each"
)
