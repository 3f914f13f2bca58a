"""Eigenpairs from step to step, each search starting where the last one ended."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradlens.curvature.eigenpairs import EXPLORATION, RitzPairs, Which, ritz_pairs
from gradlens.curvature.products import SymmetricMatrix


class WarmStartedEigenpairs:
    """``eigenpairs`` that remembers the last eigenvectors, with a tolerance and a budget.

    Every search but each ``explore_every``-th is short: it starts from the vector after the last
    wanted one, too, instead of a random one, and tries one more direction. So an eigenvalue that
    has overtaken those known may be seen some searches late, at the next full one for sure.
    """

    def __init__(self, tolerance: float, max_products: int, explore_every: int = 1) -> None:
        self._tolerance = tolerance
        self._max_products = max_products
        self._explore_every = explore_every
        self._searches = 0
        self._known: Sequence[Tensor] = ()

    def __call__(
        self, matrix: SymmetricMatrix, seed: int, k: int = 1, which: Which = "largest"
    ) -> RitzPairs:
        """The outermost eigenpairs of a matrix that has changed a little since the last call."""
        known = self._known if self._fits(matrix) else ()
        in_full = not known or self._searches % self._explore_every == 0
        found = ritz_pairs(
            matrix,
            k,
            which,
            self._tolerance,
            self._max_products,
            known[:k] if in_full else known,
            seed,
            EXPLORATION if in_full else 1,
        )
        self._searches += 1
        self._known = found.vectors
        return found

    def _fits(self, matrix: SymmetricMatrix) -> bool:
        """Not if other parameters are trained by now."""
        return all(len(vector) == matrix.shape[0] for vector in self._known)
