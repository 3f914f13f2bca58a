"""The largest eigenvalue of the Hessian."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.eigenpairs import WarmStartedEigenpairs
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.kinds import CurvatureQuantity


@dataclass(eq=False)
class HessMaxEV(CurvatureQuantity):
    """Largest (algebraic) eigenvalue of the mini-batch Hessian, by Lanczos' method.

    At one of ``search_interval`` tracked steps, it searches: it starts from the eigenvector of the
    last tracked step and from a random vector, and takes at least ten products, so that it finds an
    eigenvalue that has become larger than that of the last eigenvector. At the other steps, it only
    improves the last eigenvector, by one product or more, until the value's error is within the
    tolerance. If another eigenvalue has become larger in the meantime, the next search finds it. By
    default, ``search_interval`` is 1 and each step has a search.

    The value of a search has an eigenvalue of the Hessian within the relative ``tolerance``. At the
    other steps, the error is estimated from the residual and the distance to the next eigenvalue of
    the last search, and there is an eigenvalue within √(tolerance/2) in any case. The largest
    eigenvalue is never below the value, except for rounding. If the error is not within the
    tolerance after ``max_products`` Hessian products, the value is a NaN whose reason has the
    estimate and its residual. ``ValueError`` for a ``search_interval`` below one.
    """

    view = View("Largest Hessian eigenvalue", group="curvature", yscale="symlog", label="λ₁")

    # As in cockpit-for-pytorch's power iteration.
    tolerance: float = 1e-3
    max_products: int = 100
    search_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search_interval < 1:
            raise ValueError(
                f"{self.name}: search_interval is {self.search_interval}: pass 1 for a search at "
                "every tracked step, or more"
            )
        self._eigenpairs = self.keeps = WarmStartedEigenpairs(
            self.tolerance, self.max_products, self.search_interval
        )

    def compute(self, curvature: Curvature) -> float:
        found = self._eigenpairs(curvature.hessian, curvature.seed)
        if found.converged:
            return float(found.values[0])
        if not math.isfinite(found.values[0]):
            return Undefined(found.reason)
        best = f"{found.values[0]:.4g} ± {found.residuals[0]:.2g}"
        return Undefined(f"{found.reason}; the estimate is {best}")
