"""The trace of the Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.diagonals import DiagonalKind, check_request
from gradlens.curvature.estimate import Estimate
from gradlens.history.view import View
from gradlens.quantities.quantity import CurvatureQuantity


@dataclass(eq=False)
class HessTrace(CurvatureQuantity):
    """Trace of the mini-batch Hessian, or of the generalised Gauss-Newton matrix.

    ``curvature`` selects the matrix and how its diagonal is computed:

    - ``"diag_h"``, the Hessian. It is exact where its diagonal is that of the Gauss-Newton matrix
      and that is exact: for networks whose outputs are piecewise linear in each parameter, such as
      those with ReLU and, in eval mode, BatchNorm.
    - ``"diag_ggn_exact"``, the Gauss-Newton matrix. It is exact where all parameters have
      per-sample gradients and each sample has at most 256 outputs.
    - ``"diag_ggn_mc"``, the Gauss-Newton matrix, by Monte Carlo sampling, which is cheap:
      ``samples`` backward passes from random gradients at the outputs, each for all samples of the
      batch or for a random ``sub_batch`` of them. The standard error is computed from the
      differences between the passes; with one pass, from those between the batch's samples, which
      overestimates it. If few samples have most of the trace, a sub-batch may contain none of them,
      and the interval is too narrow. Where samples are coupled in the network, as by BatchNorm,
      there are three passes at least, each for all samples.

    For all other networks the trace is estimated by Hutchinson's method with ``samples`` products,
    at least two. For ``"diag_ggn_mc"``, whether the graph keeps the samples apart is checked at the
    first step and whenever its operations, shapes or parameters change: samples that are mixed
    without such a change, for example by other numbers in an index, are not detected.

    A value holds the ``"trace"``, its ``"standard_error"``, the ends ``"low"`` and ``"high"`` of a
    95 % confidence interval, the ``"method"`` (``"exact"``, ``"Monte Carlo"`` or ``"Hutchinson"``),
    and under ``"parameters"`` the first four for the block of each parameter. The Gauss-Newton
    matrix needs the tensor of outputs through which the loss depends on the parameters; without it,
    the value is a NaN whose reason names what to pass. ``ValueError`` for an unknown ``curvature``,
    and for ``samples`` or ``sub_batch`` below their minimum.
    """

    view = View("Hessian trace", group="curvature", yscale="symlog", label="tr(H)")

    curvature: DiagonalKind = "diag_h"
    samples: int = 10
    sub_batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # The error is estimated from several samples: those of the batch for one Monte Carlo pass.
        least = 1 if self.curvature == "diag_ggn_mc" else 2
        check_request(self.name, self.curvature, self.samples, least, self.sub_batch)

    def compute(self, curvature: Curvature) -> dict[str, Any]:
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
