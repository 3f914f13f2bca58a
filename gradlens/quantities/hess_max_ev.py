"""The largest eigenvalue of the Hessian."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradlens.curvature.eigenpairs import Eigenpairs, eigenpairs
from gradlens.curvature.loss_curvature import LossCurvature
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
        self.tolerance = tolerance
        self.max_products = max_products
        self._start: NDArray[np.float64] | None = None

    def compute(self, curvature: LossCurvature) -> float:
        found = eigenpairs(
            curvature.hessian,
            tolerance=self.tolerance,
            max_products=self.max_products,
            start=usable_start(self._start, curvature),
            seed=curvature.seed,
        )
        self._start = next_start(found)
        if found.converged:
            return float(found.values[0])
        best = f"{found.values[0]:.4g} ± {found.residuals[0]:.2g}"
        return Undefined(f"{found.reason}; it got to {best}")


def usable_start(
    start: NDArray[np.float64] | None, curvature: LossCurvature
) -> NDArray[np.float64] | None:
    """Eigenvectors of an earlier step, unless the parameters are others by now."""
    size = sum(parameter.numel() for parameter in curvature.parameters.values())
    return start if start is not None and len(start) == size else None


def next_start(found: Eigenpairs) -> NDArray[np.float64] | None:
    """Eigenvectors to begin with next time."""
    return found.vectors if bool(np.isfinite(found.vectors).all()) else None
