"""Norm and correlation of the update of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn

from gradlens.history.view import View
from gradlens.quantities.consecutive import Consecutive, geometries, mean_correlation
from gradlens.quantities.explained import explained
from gradlens.quantities.kinds import UpdateQuantity
from gradlens.quantities.parameter_quantity import parameter_layers
from gradlens.quantities.selective import choose_parameters
from gradlens.quantities.step import Step
from gradlens.quantities.update import Update
from gradlens.signals.selection import Selection, Selectors


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

    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        self.chosen = choose_parameters(
            self.name, model, parameters, self.selection, self.parameters
        )

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._steps = Consecutive() if self.correlation else None

    def compute(self, step: Step, update: Update) -> dict[str, Any]:
        chosen = {name: update.direction[name] for name in self.chosen}
        found = geometries(chosen, self.normalize, self._steps)
        values = {name: explained(each, f"the update of {name}") for name, each in found.items()}
        if self._steps is not None:
            self._steps.end_step()
        return {"parameters": values, **mean_correlation(values)}
