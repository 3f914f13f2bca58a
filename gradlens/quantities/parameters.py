"""The parameters themselves."""

from __future__ import annotations

from torch import Tensor

from gradlens.history.view import View
from gradlens.numerics.shards import whole
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step


class Parameters(SingleStepQuantity):
    """All trainable parameters by name, before the update; meant for small networks."""

    view = View("Parameters, RMS", group="layers")

    def compute(self, step: Step) -> dict[str, Tensor]:
        return {name: whole(parameter.detach()) for name, parameter in step.parameters.items()}
