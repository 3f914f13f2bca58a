"""The largest eigenvalue of the Hessian."""

from __future__ import annotations

from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.curvature.warm_start import WarmStartedEigenpairs
from gradlens.quantities.quantity import CurvatureQuantity
from gradlens.schedules import Schedule
from gradlens.undefined import Undefined
from gradlens.view import View


class HessMaxEV(CurvatureQuantity):
    """Largest (algebraic) eigenvalue of the mini-batch Hessian, by Lanczos' method.

    It starts from the eigenvector of the last tracked step. A value that hasn't converged to the
    relative ``tolerance`` within ``max_products`` Hessian products is a NaN whose reason tells how
    far it came.
    """

    view = View("Largest Hessian eigenvalue", group="curvature", yscale="symlog", label="λ₁")

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        tolerance: float = 1e-3,
        max_products: int = 100,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(track_schedule, verbose, name=name)
        self._eigenpairs = WarmStartedEigenpairs(tolerance, max_products)

    def compute(self, curvature: LossCurvature) -> float:
        found = self._eigenpairs(curvature.hessian, curvature.seed)
        if found.converged:
            return float(found.values[0])
        best = f"{found.values[0]:.4g} ± {found.residuals[0]:.2g}"
        return Undefined(f"{found.reason}; it got to {best}")
