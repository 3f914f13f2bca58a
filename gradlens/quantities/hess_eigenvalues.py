"""The outermost eigenvalues of a curvature matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.eigenpairs import WarmStartedEigenpairs, Which
from gradlens.history.view import View
from gradlens.quantities.kinds import CurvatureQuantity


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
