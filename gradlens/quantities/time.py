"""When a step took place."""

from __future__ import annotations

import time

from gradlens.history.view import View
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step


class Time(SingleStepQuantity):
    """Seconds since the epoch, right after the step's backward pass."""

    view = View("Time", group="performance", label="seconds")

    def compute(self, step: Step) -> float:
        return time.time()
