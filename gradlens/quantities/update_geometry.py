"""Size and direction of what the optimizer does to each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from gradlens.history.view import View
from gradlens.quantities.consecutive import Consecutive, geometry, mean_correlation
from gradlens.quantities.explained import explained
from gradlens.quantities.parameter_quantity import parameter_layers
from gradlens.quantities.quantity import UpdateQuantity
from gradlens.quantities.selective import choose_parameters
from gradlens.quantities.step import Step
from gradlens.quantities.update import Update
from gradlens.schedules import Schedule
from gradlens.signals.selection import Selection, Selectors


class UpdateGeometry(UpdateQuantity):
    """‖pₙ₊₁ − pₙ‖₂ of each parameter, and its correlation with the update tracked before.

    Values are those of ``OutputGradientGeometry``, recorded as ``{"parameters": {name: value}}``.
    With ``correlation``, one update is kept until the next one.
    """

    view = View("Update geometry", group="layers", yscale="log", label="‖θₙ₊₁ − θₙ‖")

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        normalize: bool = False,
        correlation: bool = True,
        *,
        parameters: str | Iterable[str] | None = None,
        layers: Selectors | Selection | None = None,
        exclude: Selectors = (),
        name: str | None = None,
    ) -> None:
        """Look at parameters as ``ParameterQuantity`` does."""
        super().__init__(track_schedule, verbose, name=name)
        self.normalize = normalize
        self.own_names = parameters
        self.selection = parameter_layers(layers, exclude)
        self.chosen: tuple[str, ...] = ()
        self._steps = Consecutive() if correlation else None

    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        self.chosen = choose_parameters(
            self.name, model, parameters, self.selection, self.own_names
        )

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if self._steps is not None:
            self._steps.forget()

    def compute(self, step: Step, update: Update) -> dict[str, Any]:
        values = {
            name: explained(
                geometry(name, update.direction[name], self.normalize, self._steps),
                f"the update of {name}",
            )
            for name in self.chosen
        }
        if self._steps is not None:
            self._steps.end_step()
        return {"parameters": values, **mean_correlation(values)}
