"""The distance of the parameters from their start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.host import together
from gradlens.numerics.norms import distances
from gradlens.numerics.precision import accumulable
from gradlens.quantities.explained import all_explained
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import REMOVED, Measure, Step
from gradlens.stateful import State


class Distance(SingleStepQuantity):
    """‖p − p₀‖₂ of each parameter by name; p₀ is its value when the first context was entered.

    If a run continues from a checkpoint without the cockpit's state, p₀ is the value there.
    """

    view = View("Distance from the start", group="step size", label="‖θ − θ₀‖")

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._start = {name: p.detach().clone() for name, p in parameters.items()}

    @property
    def measures(self) -> Sequence[Measure]:  # type: ignore[override]
        return (self._distances,)

    def _distances(self, step: Step) -> tuple[tuple[str, ...], Tensor]:
        self._start = {n: p.to(step.parameters[n].device) for n, p in self._start.items()}
        present = {n: p for n, p in step.parameters.items() if n not in step.removed}
        moved = [accumulable(parameter) for parameter in present.values()]
        sizes = distances(moved, [self._start[name] for name in present])
        return together(dict(zip(present, sizes, strict=True)))

    def compute(self, step: Step) -> dict[str, float]:
        names, sizes = step.measured(self._distances)
        found = all_explained(dict(zip(names, sizes.tolist(), strict=True)), "the parameter")
        return {name: found.get(name, Undefined(REMOVED)) for name in step.parameters}

    def state_dict(self) -> State:
        return {"start": dict(self._start)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = dict(state["start"])
