"""The eigenvalues of a curvature matrix: the outermost ones, and their density."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.density import spectral_density
from gradlens.curvature.eigenpairs import WarmStartedEigenpairs, Which
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.quantity import CurvatureQuantity


@dataclass(eq=False)
class HessEigenvalues(CurvatureQuantity):
    """The ``k`` outermost eigenvalues of the Hessian, or of the generalised Gauss-Newton matrix.

    A value holds ``"eigenvalues"``, outermost first, their ``"residuals"`` ‖Hv − λv‖, whether they
    have ``"converged"`` to the relative ``tolerance`` within ``max_products`` products of the
    matrix and a vector, the number of ``"products"``, and the ``"reason"`` if they have not.
    ``which`` is ``"largest"`` or ``"smallest"`` (algebraic), or ``"magnitude"``. ``matrix`` is
    ``"hessian"``, or ``"ggn"``, which needs ``info={"outputs": ...}``. ``ValueError`` for others.
    """

    view = View("Curvature eigenvalues", group="curvature", yscale="symlog", label="λ")

    k: int = 5
    which: Which = "largest"
    matrix: Literal["hessian", "ggn"] = "hessian"
    tolerance: float = 1e-3  # that of HessMaxEV
    max_products: int = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matrix not in ("hessian", "ggn"):
            raise ValueError(
                f'{self.name}: matrix={self.matrix!r} is unknown: use "hessian" or "ggn"'
            )
        self._eigenpairs = self.keeps = WarmStartedEigenpairs(self.tolerance, self.max_products)

    def compute(self, curvature: Curvature) -> dict[str, Any]:
        matrix = curvature.hessian if self.matrix == "hessian" else curvature.ggn
        found = self._eigenpairs(matrix, curvature.seed, self.k, self.which)
        return {
            "eigenvalues": found.values,
            "residuals": found.residuals,
            "converged": found.converged,
            "products": found.products,
            "reason": found.reason,
        }


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


@dataclass(eq=False)
class SpectralDensity(CurvatureQuantity):
    """Density of the Hessian's eigenvalues by stochastic Lanczos quadrature.

    A value holds ``"grid"`` and ``"density"`` ``[points]``, smoothed by a Gaussian of standard
    deviation ``"width"``, and a 95 % confidence band ``"low"``, ``"high"``, which holds at each
    point by itself. What is random are the probes, not the batch. Lanczos' method runs
    for ``steps`` steps from each of ``probes`` random vectors, with one Hessian product a step
    (Ghorbani et al., 2019, arXiv:1901.10159).
    """

    view = View("Hessian spectral density", group="curvature", yscale="log", label="density")

    probes: int = 4
    steps: int = 30
    points: int = 256

    def compute(self, curvature: Curvature) -> dict[str, Any]:
        found = spectral_density(
            curvature.hessian, self.probes, self.steps, points=self.points, seed=curvature.seed
        )
        low, high = found.confidence_band()
        return {
            "grid": found.grid,
            "density": found.density,
            "low": low,
            "high": high,
            "width": Undefined(found.reason) if found.reason else found.width,
        }
