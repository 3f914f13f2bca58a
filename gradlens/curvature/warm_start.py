"""Eigenpairs from step to step, each search starting where the last one ended."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradlens.curvature.eigenpairs import RitzPairs, Which, ritz_pairs
from gradlens.curvature.products import SymmetricMatrix


class WarmStartedEigenpairs:
    """``eigenpairs`` from step to step, starting from the eigenvectors found at the last one.

    The matrix may change in any way between two steps: the last vectors may then be eigenvectors of
    other eigenvalues. Each search therefore starts from a new random vector, too, and explores as
    many directions as one without a start.
    """

    def __init__(self, tolerance: float, max_products: int) -> None:
        self._tolerance = tolerance
        self._max_products = max_products
        self._last: Sequence[Tensor] = ()

    def __call__(
        self, matrix: SymmetricMatrix, seed: int, k: int = 1, which: Which = "largest"
    ) -> RitzPairs:
        """The outermost eigenpairs of a matrix, which may have changed since the last call."""
        start = self._last if self._fits(matrix) else ()
        found = ritz_pairs(matrix, k, which, self._tolerance, self._max_products, start, seed)
        self._last = found.vectors
        return found

    def _fits(self, matrix: SymmetricMatrix) -> bool:
        """Whether the last vectors are of the matrix's size: parameters may have been added."""
        return all(len(vector) == matrix.shape[0] for vector in self._last)
