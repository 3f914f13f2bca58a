"""Norm and correlation of the update of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.host import on_host
from gradlens.quantities.consecutive import Consecutive, geometries, mean_correlation
from gradlens.quantities.explained import all_explained
from gradlens.quantities.kinds import UpdateQuantity
from gradlens.quantities.parameter_quantity import parameter_layers
from gradlens.quantities.selective import choose_parameters
from gradlens.quantities.step import REMOVED, Step
from gradlens.quantities.update import Update
from gradlens.signals.selection import Selection, Selectors
from gradlens.stateful import State


@dataclass(eq=False)
class UpdateGeometry(UpdateQuantity):
    """‖pₙ₊₁ − pₙ‖₂ of each parameter, and its correlation with the update tracked before.

    Values, ``normalize`` and ``correlation`` are those of ``OutputGradientGeometry``, recorded as
    ``{"parameters": {name: value}}``. With ``correlation``, an update is kept until the next one.
    ``parameters``, ``layers`` and ``exclude`` are those of ``ParameterQuantity``.
    """

    view = View("Update geometry", group="layers", yscale="log", label="‖θₙ₊₁ − θₙ‖")

    normalize: bool = False
    correlation: bool = True
    _: KW_ONLY
    parameters: str | Iterable[str] | None = None
    layers: Selectors | Selection | None = None
    exclude: Selectors = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selection = parameter_layers(self.layers, self.exclude)
        self._steps = Consecutive() if self.correlation else None

    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        self.chosen = choose_parameters(
            self.name, model, parameters, self.selection, self.parameters
        )

    def compute(self, step: Step, update: Update) -> dict[str, Any]:
        present = {n: update.direction[n] for n in self.chosen if n not in step.removed}
        found = on_host(geometries(present, self.normalize, self._steps))
        known = all_explained(found, "the update of")
        values = {name: known.get(name, Undefined(REMOVED)) for name in self.chosen}
        if self._steps is not None:
            self._steps.end_step()
        return {"parameters": values, **mean_correlation(values)}

    def state_dict(self) -> State:
        return {} if self._steps is None else self._steps.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._steps is not None:
            self._steps.load_state_dict(state)
