"""Eigenpairs from step to step, each search starting where the last one ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradlens.curvature.eigenpairs import EXPLORATION, RitzPairs, Which, ritz_pairs
from gradlens.curvature.products import SymmetricMatrix
from gradlens.stateful import State


class WarmStartedEigenpairs:
    """``eigenpairs`` from step to step, starting from the eigenvectors found at the last one.

    Each ``explore_every``-th search is a full one. Those between are short: they start from all
    vectors of the last search, instead of a random one besides the wanted ones, and add one
    direction. An eigenvalue that has become one of the outermost may be missed by them, until the
    next full search.
    """

    def __init__(self, tolerance: float, max_products: int, explore_every: int = 1) -> None:
        self._tolerance = tolerance
        self._max_products = max_products
        self._explore_every = explore_every
        self._searches = 0
        self._last: Sequence[Tensor] = ()

    def __call__(
        self, matrix: SymmetricMatrix, seed: int, k: int = 1, which: Which = "largest"
    ) -> RitzPairs:
        """The outermost eigenpairs of a matrix that has changed a little since the last call."""
        start = self._last if self._fits(matrix) else ()
        in_full = not start or self._searches % self._explore_every == 0
        found = ritz_pairs(
            matrix,
            k,
            which,
            self._tolerance,
            self._max_products,
            start[:k] if in_full else start,
            seed,
            EXPLORATION if in_full else 1,
        )
        self._searches += 1
        self._last = found.vectors
        return found

    def state_dict(self) -> State:
        """The vectors of the last search, which are never changed in place."""
        return {"searches": self._searches, "vectors": list(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._searches, self._last = state["searches"], list(state["vectors"])

    def _fits(self, matrix: SymmetricMatrix) -> bool:
        """Whether the last vectors are of the matrix's size: parameters may have been added."""
        return all(len(vector) == matrix.shape[0] for vector in self._last)
