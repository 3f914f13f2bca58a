"""The distance of the parameters from their start."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from gradlens.history.view import View
from gradlens.numerics.norms import norms
from gradlens.quantities.explained import explained
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step


class Distance(SingleStepQuantity):
    """‖p − p₀‖₂ of each parameter by name; p₀ is its value when the first context was entered."""

    view = View("Distance from the start", group="step size", label="‖θ − θ₀‖")

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._start = {name: p.detach().clone() for name, p in parameters.items()}

    def compute(self, step: Step) -> dict[str, Tensor | float]:
        sizes = norms([p.detach() - self._start[name] for name, p in step.parameters.items()])
        return {
            name: explained(size, f"the parameter {name}")
            for name, size in zip(step.parameters, sizes, strict=True)
        }
