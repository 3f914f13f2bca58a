"""Eigenpairs from step to step, each search starting where the last one ended."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradlens.curvature.eigenpairs import Eigenpairs, Which, eigenpairs
from gradlens.curvature.products import SymmetricMatrix


class WarmStartedEigenpairs:
    """``eigenpairs`` that remembers the last eigenvectors, with a tolerance and a budget."""

    def __init__(self, tolerance: float, max_products: int) -> None:
        self._tolerance = tolerance
        self._max_products = max_products
        self._start: NDArray[np.float64] | None = None

    def __call__(
        self, matrix: SymmetricMatrix, seed: int, k: int = 1, which: Which = "largest"
    ) -> Eigenpairs:
        """The outermost eigenpairs of a matrix that has changed a little since the last call."""
        start = self._start
        if start is not None and len(start) != matrix.shape[0]:
            start = None  # other parameters are trained by now
        found = eigenpairs(
            matrix,
            k,
            which,
            tolerance=self._tolerance,
            max_products=self._max_products,
            start=start,
            seed=seed,
        )
        self._start = found.vectors if bool(np.isfinite(found.vectors).all()) else None
        return found
