"""What the active quantities of a step have found, or why they have no value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradlens.cockpit.boundary import Boundary, Refuse
from gradlens.cockpit.updates import WaitingQuantity
from gradlens.cockpit.values import recordable
from gradlens.curvature.curvature import Curvature
from gradlens.graph.undisturbed import unseen
from gradlens.history.undefined import Undefined
from gradlens.quantities.quantity import Needed, Phase, Quantity
from gradlens.quantities.step import Step
from gradlens.reductions import Reduction


class StepValues:
    """Calls the ``active`` quantities of a step in their phases, and keeps what they return.


    ``recorded`` are the values that are known, and ``failure`` is the reason why none of them has
    one, if something has failed that all depend on.
    """

    def __init__(self, global_step: int, boundary: Boundary) -> None:
        self._step = global_step
        self._boundary = boundary
        self.active: Sequence[Quantity] = ()
        self._computed: Sequence[Quantity] = ()
        self.recorded: dict[str, Any] = {}
        self.failure = ""
        self._earlier: dict[str, Any] = {}

    def begin(self, active: Sequence[Quantity]) -> None:
        """Take these quantities for the active ones of the step."""
        self.active = active
        self._computed = [quantity for quantity in active if quantity.should_compute(self._step)]

    def refusing(self, *quantities: Quantity) -> Refuse:
        """A function that gives quantities no value, for a reason."""

        def refuse(reason: str) -> None:
            for quantity in quantities:
                if quantity in self._computed:
                    self.recorded.setdefault(quantity.name, Undefined(reason))

        return refuse

    def refuse_all(self, reason: str) -> None:
        """Give no quantity a value."""
        self.failure = self.failure or reason
        self.refusing(*self.active)(reason)

    def needs(self, needed: Needed) -> bool:
        """Whether a quantity has this need."""
        return any(needed in quantity.needs for quantity in self.active)

    def check_needs(self, info: Mapping[str, Any], raises: bool) -> None:
        """Quantities without what the user passes to the context have no value.

        ``ValueError`` instead if it ``raises``, as before anything was recorded: nothing is lost
        by ending a run at its first step.
        """
        for quantity in self.active:
            needed = next((n for n in quantity.needs if n != _FOUND and n not in info), "")
            if needed:
                reason = NOT_PASSED.format(quantity=quantity.name, needed=needed)
                if raises:
                    raise ValueError(reason)
                self.refusing(quantity)(reason)

    @property
    def retain_gradients(self) -> bool:
        """Whether a quantity needs the per-sample gradients until the optimizer has stepped."""
        return any(quantity.retains_gradients for quantity in self._computed)

    @property
    def reductions(self) -> list[Reduction]:
        """Reductions of the per-sample gradients, in the same order in all processes."""
        found: list[Reduction] = []
        for quantity in self.active:
            try:
                found += quantity.reductions_at(self._step)
            except Exception as error:
                self._boundary.end(quantity.name, self.refusing(quantity), error)
        return found

    @property
    def before_backward(self) -> list[Quantity]:
        """The quantities that compute before the backward pass, and have no value yet."""
        active = (q for q in self.active if q.name not in self.recorded)
        return [quantity for quantity in active if Phase.BEFORE_BACKWARD in quantity.phases]

    def compute_before(self, curvature: Curvature, quantities: Iterable[Quantity]) -> None:
        """Call quantities with the curvature of a loss, whose graph is whole."""
        for quantity in quantities:
            with self._boundary.contain(quantity.name, self.refusing(quantity)):
                self._take(quantity, Phase.BEFORE_BACKWARD, quantity.before_backward(curvature))

    def compute_after(self, step: Step) -> None:
        """Call the quantities after the backward pass."""
        with unseen():
            for quantity in self.active:
                try:
                    self._compute_after(quantity, step)
                except Exception as error:
                    self._boundary.end(quantity.name, self.refusing(quantity), error)

    def _compute_after(self, quantity: Quantity, step: Step) -> None:
        name, phases = quantity.name, quantity.phases
        due = name not in self.recorded and quantity in self._computed
        begun = name in self._earlier or phases[0] is Phase.AFTER_BACKWARD
        if due and begun and Phase.AFTER_BACKWARD in phases:
            found = quantity.after_backward(step, self._earlier.pop(name, None))
            self._take(quantity, Phase.AFTER_BACKWARD, found)
        quantity.adapt_to(step)

    def _take(self, quantity: Quantity, phase: Phase, found: Any) -> None:
        """Keep what a phase has returned: the value, if it was the quantity's last phase."""
        if phase is quantity.phases[-1]:
            self.recorded[quantity.name] = recordable(quantity, self._step, found)
        else:
            self._earlier[quantity.name] = found

    @property
    def waiting(self) -> list[WaitingQuantity]:
        """The quantities that need the update after this step."""
        return [
            WaitingQuantity(quantity, self._earlier.get(quantity.name))
            for quantity in self._computed
            if quantity.phases[-1] in (Phase.AFTER_UPDATE, Phase.AT_NEXT_STEP)
            and quantity.name not in self.recorded
        ]


_FOUND = "individual_losses"
"""What is found without being passed."""

NOT_PASSED = (
    "{quantity} needs the {needed}: pass {needed}=... to the context, as in "
    "cockpit(global_step, {needed}={needed})"
)
