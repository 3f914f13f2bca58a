"""How far parameters move: from their start, and in each update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.host import together
from gradlens.numerics.norms import distances
from gradlens.numerics.precision import accumulable
from gradlens.quantities.consecutive import ComparesSteps, geometries, mean_correlation
from gradlens.quantities.explained import all_explained
from gradlens.quantities.parameter_quantity import OfParameters
from gradlens.quantities.quantity import SingleStepQuantity, UpdateQuantity
from gradlens.quantities.step import REMOVED, Measure, Step
from gradlens.quantities.update import Update
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


class UpdateSize(UpdateQuantity):
    """‖pₙ₊₁ − pₙ‖₂ of each parameter by name, for any optimizer."""

    view = View("Update size", group="step size", yscale="log", label="‖θₙ₊₁ − θₙ‖")

    def compute(self, step: Step, update: Update) -> dict[str, float]:
        removed = dict.fromkeys(step.removed, Undefined(REMOVED))
        return all_explained({**update.norms, **removed}, "the update of")


@dataclass(eq=False)
class UpdateGeometry(ComparesSteps, OfParameters, UpdateQuantity):
    """‖pₙ₊₁ − pₙ‖₂ of each parameter, and its correlation with the update tracked before.

    Values, ``normalize`` and ``correlation`` are those of ``OutputGradientGeometry``, recorded as
    ``{"parameters": {name: value}}``. With ``correlation``, an update is kept until the next one.
    ``parameters``, ``layers`` and ``exclude`` are those of ``ParameterQuantity``.
    """

    part = "update of"
    view = View("Update geometry", group="layers", yscale="log", label="‖θₙ₊₁ − θₙ‖")

    normalize: bool = False
    correlation: bool = True

    def compute(self, step: Step, update: Update) -> dict[str, Any]:
        present = {name: update.direction[name] for name in self.present(step)}
        steps = self.steps if self.correlation else None
        return self.record(geometries(present, self.normalize, steps))

    def summary(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return mean_correlation(parameters)
