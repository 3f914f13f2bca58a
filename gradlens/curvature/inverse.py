"""Products with the inverse of a damped symmetric matrix, by conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.curvature.operator import (
    Products,
    Seed,
    SymmetricMatrix,
    SymmetricOperator,
    normal_like,
)
from gradlens.numerics.norms import inner, norm
from gradlens.numerics.unavailable import UnavailableError

VECTORS = 5
"""Vectors that each solution keeps: the given one, x, the residual, the direction and another."""

NOT_POSITIVE = (
    "the matrix plus {damping:g} times the identity isn't positive definite, as conjugate "
    "gradients need it: take a damping above the size of the smallest eigenvalue, or a positive "
    "semidefinite matrix such as GGNOperator"
)
BUDGET = "the residual is {residual:.3g} after {products} products: raise max_products or damping"
ROUNDING = (
    "the residual stays at {residual:.3g} by rounding: take a larger tolerance or damping, or a "
    "model in float64"
)


@dataclass(frozen=True)
class Solution:
    """x ``[D]`` with (H + damping·I)x = b, approximately.

    ``residual`` is ‖b − (H + damping·I)x‖/‖b‖, from a product with x. ``converged`` says that it is
    within the tolerance; if not, ``reason`` says why. ``products`` counts the products with H.
    """

    vector: NDArray[np.float64]
    residual: float
    converged: bool
    products: int
    reason: str = ""


class _Run:
    """Conjugate gradients for a vector b ``[D]``: x, its residual r, and the last direction.

    ``square`` is the product of r with the preconditioned r there.
    """

    def __init__(self, b: Tensor) -> None:
        self.b = b
        self.size = float(norm(b))
        self.x, self.residual, self.direction = torch.zeros_like(b), b.clone(), torch.zeros_like(b)
        self.square = math.inf
        self.count = 0
        self.reason = ""
        if not math.isfinite(self.size):
            self.x.fill_(math.nan)
            self.reason = "the vector contains NaN or Inf"


@final
class InverseOperator(SymmetricOperator):
    """(H + ``damping``·I)⁻¹ ``[D, D]`` of a symmetric matrix H.

    A product takes as many with H as conjugate gradients need for a residual of ``tolerance``
    relative to the vector, and at most ``max_products``; ``solve`` returns it with its residual.
    ``damping`` must make the matrix positive definite. With a ``rank``, they are preconditioned by
    an approximation of H of that rank (Frangella et al., 2023, Alg. 2.1), from as many products
    with random vectors, which all solutions share: fewer products for each where H has a few
    eigenvalues that are far larger than the others and the damping. Numbers are of float64, and the
    approximation takes four of them for each parameter and rank at most.

    Raises ``ValueError`` for a negative damping or rank; products raise ``UnavailableError`` where
    they don't converge.
    """

    def __init__(
        self,
        matrix: SymmetricMatrix,
        damping: float,
        *,
        tolerance: float = 1e-6,
        max_products: int = 300,
        rank: int = 0,
        seed: Seed = 0,
    ) -> None:
        for name, value in {"damping": damping, "rank": rank}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: pass a number that isn't negative")
        size = matrix.shape[0]
        self.matrix = matrix
        self.damping = damping
        self.tolerance = tolerance
        self.max_products = max_products
        self._rank = min(rank, size)
        self._seed = seed
        self._preconditioner: tuple[Tensor, Tensor] | None = None
        # The stubs have only the constructor from functions.
        super().__init__(np.dtype(np.float64), (size, size))  # type: ignore[call-arg]

    def solve(self, vector: NDArray[Any]) -> Solution:
        """The solution x of (H + damping·I)x = ``vector`` ``[D]``, with its residual.

        By conjugate gradients (Hestenes and Stiefel, 1952, Sec. 3). Where these don't converge, x
        is what they have come to. NaN with the ``reason`` where there are no products.
        """
        return self.solve_many([vector])[0]

    def solve_many(self, vectors: Sequence[NDArray[Any]] | NDArray[Any]) -> list[Solution]:
        """The solutions of several vectors ``[D]``, each as by ``solve``.

        Of a matrix over data, a product of all that aren't solved yet takes one pass.
        """
        for vector in vectors:
            if np.shape(vector) != (self.shape[0],):
                raise ValueError(f"the vector has shape {np.shape(vector)}, not ({self.shape[0]},)")
        products = Products(self.matrix)
        runs = [_Run(torch.tensor(np.asarray(v), device="cpu").to(products.like)) for v in vectors]
        try:
            if self._rank and self._preconditioner is None:
                self._preconditioner = self._low_rank(products)
            while going := [run for run in runs if self._goes_on(run)]:
                images = products.each([self._turned(run) for run in going])
                for run, (_, image) in zip(going, images, strict=True):
                    self._step(run, image + self.damping * run.direction)
            solved = [run for run in runs if 0 < run.size < math.inf]
            images = products.each([run.x for run in solved])
            for run, (_, image) in zip(solved, images, strict=True):
                run.residual = run.b - image - self.damping * run.x
                run.count += 1
        except UnavailableError as error:
            nan = np.full(self.shape[0], np.nan)
            return [Solution(nan, math.nan, False, run.count, str(error)) for run in runs]
        return [self._solution(run) for run in runs]

    def _goes_on(self, run: _Run) -> bool:
        # To half of the tolerance, since the residual of the recurrence differs by rounding.
        if run.reason or not float(norm(run.residual)) > self.tolerance * run.size / 2:
            return False
        run.reason = BUDGET if run.count >= self.max_products else ""
        return not run.reason

    def _turned(self, run: _Run) -> Tensor:
        """The next direction."""
        scaled = self._preconditioned(run.residual)
        before, run.square = run.square, float(inner(run.residual, scaled))
        run.direction = scaled + run.square / before * run.direction
        return run.direction

    def _step(self, run: _Run, image: Tensor) -> None:
        """Along the direction, whose product with the damped matrix is given."""
        run.count += 1
        curvature = float(inner(run.direction, image))
        if curvature <= 0:
            run.reason = NOT_POSITIVE
            return
        step = run.square / curvature
        run.x += step * run.direction
        run.residual -= step * image

    def _solution(self, run: _Run) -> Solution:
        residual = float(norm(run.residual)) / run.size if run.size else 0.0
        reason = run.reason or (ROUNDING if residual > self.tolerance else "")
        reason = reason.format(residual=residual, products=run.count, damping=self.damping)
        return Solution(run.x.cpu().numpy(), residual, not reason, run.count, reason)

    def _low_rank(self, products: Products) -> tuple[Tensor, Tensor]:
        """Orthonormal columns ``[D, r]``, and by how much what is along each is shrunk, ``[r]``."""
        like = products.like.expand(self._rank, -1)
        drawn = normal_like(like, np.random.default_rng(self._seed))
        start, _ = torch.linalg.qr(drawn.T)
        images = torch.stack([image for _, image in products.each(start.T)], dim=1)
        shift = products.rounding  # without it, rounding could make small eigenvalues negative
        images += shift * start
        factor, failed = torch.linalg.cholesky_ex(start.T @ images)
        if int(failed):  # the matrix isn't positive semidefinite, which conjugate gradients find
            return start[:, :0], start[0, :0]
        root = torch.linalg.solve_triangular(factor, images.T, upper=False).T
        vectors, values, _ = torch.linalg.svd(root, full_matrices=False)
        values = (values.square() - shift).clamp_(min=0.0)
        kept = values > shift
        values = values[kept] + self.damping
        return vectors[:, kept], values[-1:] / values - 1

    def _preconditioned(self, vector: Tensor) -> Tensor:
        if self._preconditioner is None:
            return vector.clone()
        columns, shrunk = self._preconditioner
        return vector + columns @ (shrunk * (columns.T @ vector))

    def _matmat(self, X: NDArray[Any]) -> NDArray[Any]:  # noqa: N803 (scipy's name)
        found = self.solve_many(X.T)
        for each in found:
            if not each.converged:
                raise UnavailableError(each.reason)
        return np.stack([each.vector for each in found], axis=1)
