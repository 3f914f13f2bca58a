"""The trace of the Hessian."""

from __future__ import annotations

from typing import Any

from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.curvature.loss_diagonal import DiagonalKind, check_request
from gradlens.curvature.trace import Estimate
from gradlens.quantities.quantity import CurvatureQuantity
from gradlens.schedules import Schedule
from gradlens.view import View


class HessTrace(CurvatureQuantity):
    """Trace of the mini-batch Hessian, or of the generalised Gauss-Newton matrix.

    ``curvature`` is ``"diag_h"``, ``"diag_ggn_exact"`` or ``"diag_ggn_mc"``, exact for the first
    two where BackPACK's rules hold: networks that are a sequence of its modules, with an extended
    loss module. The second is exact, too, wherever layers give individual gradients. Elsewhere it
    is estimated by Hutchinson's method with ``samples`` products, and the Monte-Carlo diagonal with
    as many sampled targets. Whatever comes out is checked against products of the loss's own
    matrix with random vectors.

    A value holds the ``"trace"``, its ``"standard_error"``, the ends ``"low"`` and ``"high"`` of a
    95 % confidence interval, the ``"method"`` (``"exact"``, ``"Monte Carlo"``, ``"Hutchinson"``,
    or empty where the trace is a NaN), and under ``"parameters"`` the first four for each
    parameter's block. A Gauss-Newton matrix takes the one tensor of outputs through which the loss
    depends on the parameters; without one, the trace is a NaN that says what to pass.
    """

    view = View("Hessian trace", group="curvature", yscale="symlog", label="tr(H)")

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        curvature: DiagonalKind = "diag_h",
        samples: int = 10,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(track_schedule, verbose, name=name)
        check_request(self.name, curvature, samples, least=2)  # which have an error
        self.curvature: DiagonalKind = curvature
        self.samples = samples

    def compute(self, curvature: LossCurvature) -> dict[str, Any]:
        found = curvature.diagonal(self.curvature, self.samples)
        parameters = {name: _fields(trace) for name, trace in found.traces.items()}
        return {**_fields(found.trace), "method": found.method, "parameters": parameters}


def _fields(estimate: Estimate) -> dict[str, float]:
    low, high = estimate.confidence_interval()
    return {
        "trace": estimate.value,
        "standard_error": estimate.standard_error,
        "low": low,
        "high": high,
    }
