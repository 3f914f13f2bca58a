"""Eigenpairs from step to step, each search starting where the last one ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from gradlens.curvature.eigenpairs import RitzPairs, Which, outwardness, ritz_pairs
from gradlens.curvature.products import SymmetricMatrix
from gradlens.stateful import State

FOLLOWING = 8
"""Products in which the last pairs must be found again; otherwise there is a search in full.

A search in full takes ten products at least: beyond that number, following saves nothing.
"""


class WarmStartedEigenpairs:
    """``eigenpairs`` from step to step, starting from products with the last eigenvectors.

    The matrix may change in any way between two steps: the last vectors may then be eigenvectors of
    other eigenvalues. A search in full therefore starts from a new random vector, too, and explores
    as many directions as one without a start.

    One of ``search_interval`` calls searches in full. The others follow the last pairs: they start
    from the last vectors alone, and stop as soon as the errors are within the tolerance, which are
    estimated from the residuals and the gap to the next eigenvalue of the last search. One that has
    become larger elsewhere is found by the next search in full. That comes at once where the last
    pairs aren't found again in ``FOLLOWING`` products, and where the k-th has fallen behind what
    was the next one at the last search.
    """

    def __init__(self, tolerance: float, max_products: int, search_interval: int = 1) -> None:
        self._tolerance = tolerance
        self._max_products = max_products
        self._search_interval = search_interval
        self._last: Sequence[Tensor] = ()
        self._next = math.nan
        self._followed = 0

    def __call__(
        self, matrix: SymmetricMatrix, seed: int, k: int = 1, which: Which = "largest"
    ) -> RitzPairs:
        """The outermost eigenpairs of a matrix, which may have changed since the last call."""
        start, spent = self._last if self._fits(matrix) else (), 0
        if start and self._followed + 1 < self._search_interval:
            budget = min(FOLLOWING * k, self._max_products)
            found = ritz_pairs(
                matrix, k, which, self._tolerance, budget, start, seed, 0, self._next
            )
            if found.converged and not self._has_fallen_behind(found, which):
                self._last, self._followed = found.guesses, self._followed + 1
                return found
            start, spent = found.guesses, found.products
        found = ritz_pairs(matrix, k, which, self._tolerance, self._max_products, start, seed)
        self._last, self._next, self._followed = found.guesses, found.next_value, 0
        return replace(found, products=spent + found.products)

    def state_dict(self) -> State:
        """The vectors of the last call, which are never changed in place, and what it needs."""
        return {"vectors": list(self._last), "next": self._next, "followed": self._followed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._last = list(state["vectors"])
        self._next, self._followed = state["next"], state["followed"]

    def _fits(self, matrix: SymmetricMatrix) -> bool:
        """Whether the last vectors are of the matrix's size: parameters may have been added."""
        return all(len(vector) == matrix.shape[0] for vector in self._last)

    def _has_fallen_behind(self, found: RitzPairs, which: Which) -> bool:
        last, following = outwardness(np.array([found.values[-1], self._next]), which)
        return bool(last < following)
