"""The trace of the Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.curvature.loss_diagonal import DiagonalKind, check_request
from gradlens.curvature.trace import Estimate
from gradlens.history.view import View
from gradlens.quantities.kinds import CurvatureQuantity


@dataclass(eq=False)
class HessTrace(CurvatureQuantity):
    """Trace of the mini-batch Hessian, or of the generalised Gauss-Newton matrix.

    ``curvature`` is ``"diag_h"``, ``"diag_ggn_exact"`` or ``"diag_ggn_mc"``, exact for the first
    two where BackPACK's rules hold: networks that are a sequence of its modules, with an extended
    loss module. The second is exact, too, wherever layers give per-sample gradients. Elsewhere it
    is estimated by Hutchinson's method with ``samples`` products. Whatever comes out is checked
    against products of the loss's own matrix with random vectors.

    ``"diag_ggn_mc"`` is the cheap one: ``samples`` backward passes from random gradients of the
    outputs, without the weights' gradients unless the loss's graph has to tell of some parameters.
    Each is for all samples of the batch, or for a random ``sub_batch`` of them, which makes norms
    of convolutions cheaper. The error is that between passes; of a single one it is that between
    the batch's samples, and rather too large. Who tells is checked at the first step, and when
    operations, shapes or parameters of the graph change: a network that comes to mix samples
    without any of that, by other numbers in an index, say, is not noticed. Elsewhere it is what the
    diagonal is estimated by, with two ``samples`` at least.

    A value holds the ``"trace"``, its ``"standard_error"``, the ends ``"low"`` and ``"high"`` of a
    95 % confidence interval, the ``"method"`` (``"exact"``, ``"Monte Carlo"``, ``"Hutchinson"``,
    or empty where the trace is a NaN), and under ``"parameters"`` the first four for each
    parameter's block. A Gauss-Newton matrix takes the one tensor of outputs through which the loss
    depends on the parameters; without one, the trace is a NaN that says what to pass.
    """

    view = View("Hessian trace", group="curvature", yscale="symlog", label="tr(H)")

    curvature: DiagonalKind = "diag_h"
    samples: int = 10
    sub_batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # One draw of targets for many samples has an error, one product has none.
        least = 1 if self.curvature == "diag_ggn_mc" else 2
        check_request(self.name, self.curvature, self.samples, least, self.sub_batch)

    def compute(self, curvature: LossCurvature) -> dict[str, Any]:
        found = curvature.traces(self.curvature, self.samples, self.sub_batch)
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
