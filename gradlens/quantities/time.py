"""The time of a step."""

from __future__ import annotations

import time

from gradlens.history.view import View
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step


class Time(SingleStepQuantity):
    """Time after the step's backward pass, in seconds since the epoch (``time.time()``)."""

    view = View("Time per step", group="performance", label="seconds")

    def compute(self, step: Step) -> float:
        return time.time()
