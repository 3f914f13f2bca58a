"""The norm of the parameter update."""

from __future__ import annotations

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.explained import all_explained
from gradlens.quantities.kinds import UpdateQuantity
from gradlens.quantities.step import REMOVED, Step
from gradlens.quantities.update import Update


class UpdateSize(UpdateQuantity):
    """‖pₙ₊₁ − pₙ‖₂ of each parameter by name, for any optimizer."""

    view = View("Update size", group="step size", yscale="log", label="‖θₙ₊₁ − θₙ‖")

    def compute(self, step: Step, update: Update) -> dict[str, float]:
        removed = dict.fromkeys(step.removed, Undefined(REMOVED))
        return all_explained({**update.norms, **removed}, "the update of")
