"""The largest eigenvalue of the Hessian."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.warm_start import WarmStartedEigenpairs
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.kinds import CurvatureQuantity
from gradlens.stateful import State


@dataclass(eq=False)
class HessMaxEV(CurvatureQuantity):
    """Largest (algebraic) eigenvalue of the mini-batch Hessian, by Lanczos' method.

    At one of ``search_interval`` tracked steps, the method starts from the eigenvector of the last
    tracked step and from a random vector. It takes at least ten products, so that it finds an
    eigenvalue that has become larger than that of the last eigenvector. At the others it follows
    the last eigenvector alone, in as many products as its residual takes to be within the
    tolerance, one or more; an eigenvalue that has overtaken it in the meantime is found by the next
    search. By default, ``search_interval`` is 1 and each step has a search.

    An eigenvalue of the Hessian lies within ``tolerance`` of each value, relatively, and the
    largest one not below it but for rounding. A value whose residual is not within the tolerance
    after ``max_products`` Hessian products is a NaN whose reason states the estimate and its
    residual. ``ValueError`` for a ``search_interval`` below one.
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
        self._eigenpairs = WarmStartedEigenpairs(
            self.tolerance, self.max_products, self.search_interval
        )

    def compute(self, curvature: Curvature) -> float:
        found = self._eigenpairs(curvature.hessian, curvature.seed)
        if found.converged:
            return float(found.values[0])
        best = f"{found.values[0]:.4g} ± {found.residuals[0]:.2g}"
        return Undefined(f"{found.reason}; the estimate is {best}")

    def state_dict(self) -> State:
        return self._eigenpairs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._eigenpairs.load_state_dict(state)
