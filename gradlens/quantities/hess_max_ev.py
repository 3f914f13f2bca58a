"""The largest eigenvalue of the Hessian."""

from __future__ import annotations

from dataclasses import dataclass

from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.curvature.warm_start import WarmStartedEigenpairs
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.kinds import CurvatureQuantity


@dataclass(eq=False)
class HessMaxEV(CurvatureQuantity):
    """Largest (algebraic) eigenvalue of the mini-batch Hessian, by Lanczos' method.

    The method starts from the eigenvector of the last tracked step and from a random vector. It
    takes at least ten products, so that it finds an eigenvalue that has become larger than that of
    the last eigenvector. A value that has not converged to the relative ``tolerance`` within
    ``max_products`` Hessian products is a NaN whose reason states the estimate and its residual.
    """

    view = View("Largest Hessian eigenvalue", group="curvature", yscale="symlog", label="λ₁")

    # As in cockpit-for-pytorch's power iteration.
    tolerance: float = 1e-3
    max_products: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self._eigenpairs = WarmStartedEigenpairs(self.tolerance, self.max_products)

    def compute(self, curvature: LossCurvature) -> float:
        found = self._eigenpairs(curvature.hessian, curvature.seed)
        if found.converged:
            return float(found.values[0])
        best = f"{found.values[0]:.4g} ± {found.residuals[0]:.2g}"
        return Undefined(f"{found.reason}; the estimate is {best}")
