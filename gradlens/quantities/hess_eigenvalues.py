"""The outermost eigenvalues of a curvature matrix."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradlens.curvature.eigenpairs import Which, eigenpairs
from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.quantities.hess_max_ev import next_start, usable_start
from gradlens.quantities.quantity import CurvatureQuantity
from gradlens.schedules import Schedule
from gradlens.view import View


class HessEigenvalues(CurvatureQuantity):
    """The ``k`` outermost eigenvalues of the Hessian, or of the generalised Gauss-Newton matrix.

    A value holds ``"eigenvalues"``, outermost first, their ``"residuals"`` ‖Hv − λv‖, whether they
    have ``"converged"`` to the relative ``tolerance``, the number of ``"products"`` it took, and
    the ``"reason"`` if they haven't. ``which`` is ``"largest"`` or ``"smallest"`` (algebraic), or
    ``"magnitude"``; ``matrix="ggn"`` takes ``info={"outputs": ...}``.
    """

    view = View("Curvature eigenvalues", group="curvature", yscale="symlog", label="λ")

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        k: int = 5,
        which: Which = "largest",
        matrix: Literal["hessian", "ggn"] = "hessian",
        tolerance: float = 1e-3,
        max_products: int = 300,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(track_schedule, verbose, name=name)
        if matrix not in ("hessian", "ggn"):
            raise ValueError(f'{self.name}: matrix={matrix!r} is unknown: use "hessian" or "ggn"')
        self.k = k
        self.which: Which = which
        self.matrix = matrix
        self.tolerance = tolerance
        self.max_products = max_products
        self._start: NDArray[np.float64] | None = None

    def compute(self, curvature: LossCurvature) -> dict[str, Any]:
        found = eigenpairs(
            curvature.hessian if self.matrix == "hessian" else curvature.ggn,
            self.k,
            self.which,
            tolerance=self.tolerance,
            max_products=self.max_products,
            start=usable_start(self._start, curvature),
            seed=curvature.seed,
        )
        self._start = next_start(found)
        return {
            "eigenvalues": found.values,
            "residuals": found.residuals,
            "converged": found.converged,
            "products": found.products,
            "reason": found.reason,
        }
