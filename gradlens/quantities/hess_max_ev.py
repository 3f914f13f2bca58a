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

    It starts from the eigenvector of the last tracked step. A value that hasn't converged to the
    relative ``tolerance`` within ``max_products`` Hessian products is a NaN whose reason tells how
    far it came. A full search takes ten products at least, so that a good start hides no other
    eigenvalue; with ``explore_every`` only each so many-th tracked step has one, and the others
    take three products at least, from the two outermost vectors of the last: if another eigenvalue
    becomes the largest meanwhile, they may miss it until the next full search. ``ValueError`` for
    ``explore_every`` below one.
    """

    view = View("Largest Hessian eigenvalue", group="curvature", yscale="symlog", label="λ₁")

    tolerance: float = 1e-3
    max_products: int = 100
    explore_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.explore_every < 1:
            raise ValueError(f"{self.name}: explore_every={self.explore_every}: use 1 or more")
        self._eigenpairs = WarmStartedEigenpairs(
            self.tolerance, self.max_products, self.explore_every
        )

    def compute(self, curvature: LossCurvature) -> float:
        found = self._eigenpairs(curvature.hessian, curvature.seed)
        if found.converged:
            return float(found.values[0])
        best = f"{found.values[0]:.4g} ± {found.residuals[0]:.2g}"
        return Undefined(f"{found.reason}; it got to {best}")
