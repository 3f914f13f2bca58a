"""The mini-batch loss."""

from __future__ import annotations

from gradlens.history.view import View
from gradlens.quantities.explained import explained
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step


class Loss(SingleStepQuantity):
    """The mini-batch loss as it was passed to the context; a sum loss isn't divided by N."""

    needs = ("loss",)
    view = View("Loss", group="performance", label="loss")

    def compute(self, step: Step) -> float:
        assert step.loss is not None  # the cockpit has checked `needs`
        found: float = explained(step.loss.item(), "the loss")
        return found
