"""How far a step goes."""

from __future__ import annotations

from gradlens.quantities.quantity import UpdateQuantity
from gradlens.step import Step
from gradlens.update import Update
from gradlens.view import View


class UpdateSize(UpdateQuantity):
    """‖pₙ₊₁ − pₙ‖₂ of each parameter by name, whatever the optimizer."""

    view = View("Update size", group="step size", yscale="log", label="‖θₙ₊₁ − θₙ‖")

    def compute(self, step: Step, update: Update) -> dict[str, float]:
        return update.norms()
