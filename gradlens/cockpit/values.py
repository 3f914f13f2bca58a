"""Values: what the quantities of a step have found, or what a training loop logs or pushes."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.cockpit.boundary import Boundary, Refuse
from gradlens.curvature.curvature import Curvature
from gradlens.history.json_lines import Encoded, encoded, refused
from gradlens.history.records import Source
from gradlens.history.series import value_of
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.messages import log
from gradlens.numerics.tensors import on_host
from gradlens.quantities.quantity import Needed, Phase, Quantity
from gradlens.quantities.step import Step
from gradlens.reductions import Reduction

OF_OPTIMIZERS = (Phase.BEFORE_OPTIMIZER, Phase.AFTER_OPTIMIZER)
"""Phases around a step of the optimizer."""


class StepValues:
    """Calls the ``active`` quantities of a step in their phases, and keeps what they return.

    Those ``computed`` have a value at the step. ``recorded`` are the values that are known, and
    ``failure`` is the reason why none of them has one, if something has failed that all depend on.
    """

    def __init__(
        self, global_step: int, boundary: Boundary, active: Sequence[Quantity] = ()
    ) -> None:
        self._step = global_step
        self._boundary = boundary
        self.active = active
        self.computed = [quantity for quantity in active if quantity.should_compute(global_step)]
        self.recorded: dict[str, Any] = {}
        self.failure = ""
        self._earlier: dict[str, Any] = {}

    def refusing(self, *quantities: Quantity) -> Refuse:
        """A function that gives quantities no value, for a reason."""

        def refuse(reason: str) -> None:
            for quantity in quantities:
                if quantity in self.computed:
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
            needed = next((n for n in quantity.needs if n not in _FOUND and n not in info), "")
            if needed:
                text = NO_GROUPS if needed == "groups" else NOT_PASSED
                reason = text.format(quantity=quantity.name, needed=needed)
                if raises:
                    raise ValueError(reason)
                self.refusing(quantity)(reason)

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
        for quantity in self.active:
            name, phases = quantity.name, quantity.phases
            due = name not in self.recorded and quantity in self.computed
            begun = name in self._earlier or phases[0] is Phase.AFTER_BACKWARD
            try:
                if due and begun and Phase.AFTER_BACKWARD in phases:
                    found = quantity.after_backward(step, self._earlier.pop(name, None))
                    self._take(quantity, Phase.AFTER_BACKWARD, found)
                quantity.adapt_to(step)
            except Exception as error:
                self._boundary.end(name, self.refusing(quantity), error)

    def _take(self, quantity: Quantity, phase: Phase, found: Any) -> None:
        """Keep what a phase has returned: the value, if it was the quantity's last phase."""
        if phase is quantity.phases[-1]:
            self.recorded[quantity.name] = recordable(quantity, self._step, found)
        else:
            self._earlier[quantity.name] = found

    @property
    def waiting(self) -> dict[Quantity, Any]:
        """The quantities that need the update after this step, with what they have returned."""
        due = (q for q in self.computed if q.phases[-1] in LATER and q.name not in self.recorded)
        return {quantity: self._earlier.get(quantity.name) for quantity in due}


LATER = (*OF_OPTIMIZERS, Phase.AFTER_UPDATE, Phase.AT_NEXT_STEP)
"""Phases after the context is left."""


_FOUND = ("individual_losses", "gradients_of_parts")
"""What is found without being passed."""

NOT_PASSED = (
    "{quantity} needs the {needed}: pass {needed}=..., made before the context, as in "
    "with cockpit(global_step, {needed}={needed})"
)
NO_GROUPS = (
    "{quantity} needs the {needed} of samples: pass one for each sample, as in "
    'with cockpit(global_step, info={{"{needed}": {needed}}})'
)


def recordable(quantity: Quantity, global_step: int, value: Any) -> Encoded:
    """A quantity's value as a file has it, logged if the quantity is verbose.

    ``TypeError`` names the quantity if its value can't be recorded.
    """
    try:
        moved = value if isinstance(value, float) else on_host(value)  # most are numbers
        found = Encoded(encoded(moved, _of_tensor))
    except TypeError as error:
        raise TypeError(f"{quantity.name}: {error}") from error
    if quantity.verbose:
        log(f"[Step {global_step}] {quantity.name}: {value_of(found.content)}")
    return found


def _of_tensor(value: Any) -> NDArray[Any]:
    if not isinstance(value, Tensor):
        return refused(value)
    found = value.detach().to_dense().cpu()
    array: NDArray[Any] = (found.float() if found.dtype == torch.bfloat16 else found).numpy()
    return array


PUSHED = Source(("Aggregate",), View("", group="performance"))
"""The source of all series of pushed metrics."""


def loggable(name: str, value: Any) -> Encoded:
    """A value as a file has it; ``TypeError`` names what can't be logged."""
    if name == "epoch_count" and isinstance(value, Mapping):
        raise TypeError(
            f"log(step, {_in_words(value)}): pass values by name, as in log(step, **values)"
        )
    try:
        return Encoded(encoded(value, _of_tensor))
    except TypeError as error:
        raise TypeError(f"log({name}=...): {error}") from error


def pushable(name: str, value: Any) -> float:
    """The value of a metric as a float; ``TypeError`` names the metric if it isn't a number."""
    try:
        plain = value_of(encoded(value, _of_tensor))
        if isinstance(plain, np.ndarray) and plain.size == 1:
            plain = plain.item()
        if isinstance(plain, (int, float)):
            return plain if isinstance(plain, Undefined) else float(plain)
    except (TypeError, OverflowError):
        pass
    raise TypeError(
        f"push({name}=...) takes a number, or a tensor or array of one element, and got "
        f"{_in_words(value)}: pass each number under a name of its own"
    )


def _in_words(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    return reprlib.repr(value)
