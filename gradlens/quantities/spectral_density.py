"""The distribution of the Hessian's eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.density import spectral_density
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.kinds import CurvatureQuantity


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
