"""The trace of the Hessian."""

from __future__ import annotations

from typing import Any

from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.curvature.trace import Estimate, hutchinson_blocks
from gradlens.quantities.quantity import CurvatureQuantity
from gradlens.schedules import Schedule
from gradlens.view import View


class HessTrace(CurvatureQuantity):
    """Trace of the mini-batch Hessian by Hutchinson's method, with its error.

    A value holds the ``"trace"``, its ``"standard_error"``, the ends ``"low"`` and ``"high"`` of a
    95 % confidence interval, and under ``"parameters"`` the same for each parameter's block by
    name, from the same ``samples`` Hessian products.
    """

    view = View("Hessian trace", group="curvature", yscale="symlog", label="tr(H)")

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        samples: int = 10,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(track_schedule, verbose, name=name)
        if samples < 2:
            raise ValueError(f"{self.name}: samples={samples} leaves no error: use 2 or more")
        self.samples = samples

    def compute(self, curvature: LossCurvature) -> dict[str, Any]:
        hessian = curvature.hessian
        slices = list(hessian.slices.items())
        blocks = {"": slice(None), **{f".{name}": block for name, block in slices}}
        found = hutchinson_blocks(hessian, blocks, self.samples, curvature.seed)
        parameters = {name: _fields(found[f".{name}"]) for name, _ in slices}
        return {**_fields(found[""]), "parameters": parameters}


def _fields(estimate: Estimate) -> dict[str, float]:
    low, high = estimate.confidence_interval()
    return {
        "trace": estimate.value,
        "standard_error": estimate.standard_error,
        "low": low,
        "high": high,
    }
