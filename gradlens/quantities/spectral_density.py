"""How the eigenvalues of the Hessian are distributed."""

from __future__ import annotations

from typing import Any

from gradlens.curvature.density import spectral_density
from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.history.view import View
from gradlens.quantities.quantity import CurvatureQuantity
from gradlens.schedules import Schedule


class SpectralDensity(CurvatureQuantity):
    """Density of the Hessian's eigenvalues by stochastic Lanczos quadrature.

    A value holds ``"grid"`` and ``"density"`` ``[points]``, smoothed by a Gaussian of standard
    deviation ``"width"``, and a 95 % confidence band ``"low"``, ``"high"``. It takes
    ``probes``·``steps`` Hessian products (Ghorbani et al., 2019, arXiv:1901.10159).
    """

    view = View("Spectral density of the Hessian", group="curvature", yscale="log", label="density")

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        probes: int = 4,
        steps: int = 30,
        points: int = 256,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(track_schedule, verbose, name=name)
        self.probes = probes
        self.steps = steps
        self.points = points

    def compute(self, curvature: LossCurvature) -> dict[str, Any]:
        found = spectral_density(
            curvature.hessian, self.probes, self.steps, points=self.points, seed=curvature.seed
        )
        low, high = found.confidence_band()
        return {
            "grid": found.grid,
            "density": found.density,
            "low": low,
            "high": high,
            "width": found.width,
        }
