"""Takeuchi's information criterion: gradient noise against curvature."""

from __future__ import annotations

from abc import abstractmethod
from typing import final

from torch import Tensor

from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.curvature.loss_diagonal import DiagonalKind, LossDiagonal, Method, check_request
from gradlens.individual.reductions import SumOfSquares
from gradlens.quantities.quantity import GradientCurvatureQuantity
from gradlens.schedules import Schedule
from gradlens.statistics import takeuchi_by_diagonal, takeuchi_by_trace
from gradlens.step import NOTHING_COVERED, Step
from gradlens.undefined import Undefined
from gradlens.view import View


class TIC(GradientCurvatureQuantity):
    """What both approximations of tr(H⁻¹·Σₙgₙgₙᵀ/N) share (Thomas et al., 2020, arXiv:1906.07774).

    ``curvature`` and ``samples`` are those of ``HessTrace``, and a note tells of the first step
    whose diagonal comes from elsewhere than that before (exact, or estimated). Second moments and
    curvature are those of the parameters that have individual gradients. Where the curvature isn't
    positive the criterion has no meaning, and is a NaN.
    """

    reductions = (SumOfSquares(),)

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        curvature: DiagonalKind = "diag_h",
        epsilon: float = 1e-7,
        samples: int = 10,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(track_schedule, verbose, name=name)
        check_request(self.name, curvature, samples, least=1)
        self.curvature: DiagonalKind = curvature
        self.epsilon = epsilon
        self.samples = samples
        self._method: Method = ""

    @final
    def look(self, curvature: LossCurvature) -> LossDiagonal:
        seen = curvature.diagonal(self.curvature, self.samples)
        if self._method and seen.method and self._method != seen.method:
            curvature.remarks.append(
                f"{self.name}: from step {curvature.global_step} on {self.curvature} comes from "
                f"another method ({seen.method}, before: {self._method})"
            )
        self._method = seen.method or self._method
        return seen

    @final
    def compute(self, step: Step, seen: LossDiagonal) -> float:
        if isinstance(seen.trace.value, Undefined):
            return seen.trace.value
        sums = step.by_parameter(SumOfSquares())
        if not sums:
            raise RuntimeError(f"{self.name}: {NOTHING_COVERED.format(step=step.global_step)}")
        diagonals = {name: seen.values[name] for name in sums}
        moments = [sums[n].to(d.device, d.dtype) / step.samples for n, d in diagonals.items()]
        remedy = _remedy(self.curvature, seen.method)
        return self._criterion(moments, list(diagonals.values()), remedy)

    @abstractmethod
    def _criterion(
        self, second_moments: list[Tensor], diagonals: list[Tensor], remedy: str
    ) -> float:
        """From Σₙgₙⱼ²/N and cⱼ of each parameter; ``remedy`` is for a cⱼ that isn't positive."""


def _remedy(kind: DiagonalKind, method: Method) -> str:
    if method == "Hutchinson":
        return f"{kind} is estimated here, and more samples may help"
    if kind == "diag_h":
        return "diag_h may be negative, diag_ggn_exact can't"
    return f"{kind} is zero there"


@final
class TICDiag(TIC):
    """Σⱼ (Σₙgₙⱼ²/N) / (cⱼ + ε) over all elements j, with the curvature's diagonal c."""

    view = View("TIC (diagonal)", group="curvature", yscale="log", label="TIC")

    def _criterion(
        self, second_moments: list[Tensor], diagonals: list[Tensor], remedy: str
    ) -> float:
        return takeuchi_by_diagonal(second_moments, diagonals, self.epsilon, remedy)


@final
class TICTrace(TIC):
    """(Σₙⱼgₙⱼ²/N) / (Σⱼcⱼ + ε), with the curvature's diagonal c."""

    view = View("TIC (trace)", group="curvature", yscale="log", label="TIC")

    def _criterion(
        self, second_moments: list[Tensor], diagonals: list[Tensor], remedy: str
    ) -> float:
        return takeuchi_by_trace(second_moments, diagonals, self.epsilon, remedy)
