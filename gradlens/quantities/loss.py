"""The mini-batch loss."""

from __future__ import annotations

from torch import Tensor

from gradlens.history.view import View
from gradlens.quantities.explained import explained
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step


def _loss(step: Step) -> Tensor:
    assert step.loss is not None  # the cockpit has checked `needs`
    return step.loss.detach()


class Loss(SingleStepQuantity):
    """The mini-batch loss as it was passed to the context; a sum loss isn't divided by N."""

    needs = ("loss",)
    measures = (_loss,)
    view = View("Loss", group="performance", label="loss")

    def compute(self, step: Step) -> float:
        found: float = explained(step.measured(_loss).item(), "the loss")
        return found
