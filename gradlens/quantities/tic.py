"""Takeuchi's information criterion: the ratio of gradient noise to curvature."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.diagonals import (
    DiagonalKind,
    LossDiagonal,
    LossTraces,
    Method,
    check_request,
)
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import NOT_FINITE
from gradlens.numerics.host import on_host
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.quantity import GradientCurvatureQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import SquaredNorms, SumOfSquares


@dataclass(eq=False)
class TIC(GradientCurvatureQuantity):
    """Base of the approximations of tr(H⁻¹·Σₙgₙgₙᵀ/N) (Thomas et al., 2020, arXiv:1906.07774).

    ``curvature`` and ``samples`` are those of ``HessTrace``; ε is ``epsilon``. Only parameters that
    have per-sample gradients count. If the curvature is not positive, the criterion has no meaning
    and the value is a NaN; likewise if the batch comes in parts, since curvature is that of the
    last part alone.
    """

    curvature: DiagonalKind = "diag_h"
    epsilon: float = 1e-7  # as in cockpit-for-pytorch
    samples: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_request(self.name, self.curvature, self.samples, least=1)

    @final
    def before_backward(self, curvature: Curvature) -> LossTraces:
        if curvature.is_part:
            raise UnavailableError(OF_PARTS)
        return self._found(curvature)

    @final
    def compute(self, step: Step, earlier: Any) -> float:
        (reduction,) = self.reductions
        sums = step.by_parameter(reduction)
        return self._criterion(sums, step.samples, earlier, _remedy(self.curvature, earlier.method))

    @abstractmethod
    def _found(self, curvature: Curvature) -> LossTraces:
        """The diagonal of the curvature, or its traces."""

    @abstractmethod
    def _criterion(
        self, sums: Mapping[str, Tensor], samples: int, found: Any, remedy: str
    ) -> float:
        """The value; ``remedy`` completes the reason of a NaN if the curvature is not positive."""


OF_PARTS = (
    "the batch comes in parts, from micro-batches or processes: gradients are those of all parts, "
    "and curvature is that of one. A micro-batch with a step of its own, without "
    "accumulating=True, has a value of its own"
)


def _remedy(kind: DiagonalKind, method: Method) -> str:
    estimated = method == "Hutchinson"
    return f"{kind} is " + ("estimated, and more samples may help" if estimated else "zero there")


@final
class TICDiag(TIC):
    """Σⱼ (Σₙgₙⱼ²/N) / (cⱼ + ε) over all elements j, with the curvature's diagonal c.

    A sampled or estimated diagonal is noisy in each element, which biases the ratios. ``TICTrace``
    divides by the sum of the elements instead.
    """

    reductions = (SumOfSquares(),)
    view = View("TIC (diagonal)", group="curvature", yscale="log", label="TIC")

    def _found(self, curvature: Curvature) -> LossDiagonal:
        return curvature.diagonal(self.curvature, self.samples)

    def _criterion(
        self, sums: Mapping[str, Tensor], samples: int, found: LossDiagonal, remedy: str
    ) -> float:
        pairs = [
            (total.to(diagonal.device, diagonal.dtype) / samples, diagonal)
            for total, diagonal in ((sums[name], found.values[name]) for name in sums)
        ]
        flat = int(torch.stack([((c <= 0) & (s > 0)).sum() for s, c in pairs]).sum())
        if flat:
            elements = sum(c.numel() for _, c in pairs)
            return Undefined(
                f"the curvature is not positive at {flat} of {elements} elements ({remedy})"
            )
        total = float(torch.stack([(s / (c + self.epsilon)).sum() for s, c in pairs]).sum())
        return total if math.isfinite(total) else Undefined(NOT_FINITE)


@final
@dataclass(eq=False)
class TICTrace(TIC):
    """(Σₙⱼgₙⱼ²/N) / (Σⱼcⱼ + ε), with the curvature's diagonal c.

    ``sub_batch`` is that of ``HessTrace``.
    """

    reductions = (SquaredNorms(),)
    view = View("TIC (trace)", group="curvature", yscale="log", label="TIC")

    sub_batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_request(self.name, self.curvature, self.samples, 1, self.sub_batch)

    def _found(self, curvature: Curvature) -> LossTraces:
        return curvature.traces(self.curvature, self.samples, self.sub_batch)

    def _criterion(
        self, sums: Mapping[str, Tensor], samples: int, found: LossTraces, remedy: str
    ) -> float:
        moment = float(SquaredNorms().total(on_host([*sums.values()])).sum()) / samples
        trace = sum(found.traces[name].value for name in sums)
        if trace <= 0 < moment:
            return Undefined(f"the trace of the curvature is not positive: {trace:.4g} ({remedy})")
        ratio = moment / (trace + self.epsilon)
        return ratio if math.isfinite(ratio) else Undefined(NOT_FINITE)
