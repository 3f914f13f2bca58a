"""The loss and the time of a step."""

from __future__ import annotations

import time

from torch import Tensor

from gradlens.history.view import View
from gradlens.quantities.explained import explained
from gradlens.quantities.quantity import SingleStepQuantity
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


class Time(SingleStepQuantity):
    """Time after the step's backward pass, in seconds since the epoch (``time.time()``)."""

    view = View("Time per step", group="performance", label="seconds")

    def compute(self, step: Step) -> float:
        return time.time()
