"""Norm and correlation of the update of each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.consecutive import ComparesSteps, geometries, mean_correlation
from gradlens.quantities.explained import all_explained
from gradlens.quantities.kinds import UpdateQuantity
from gradlens.quantities.parameter_quantity import OfParameters
from gradlens.quantities.step import REMOVED, Step
from gradlens.quantities.update import Update


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
