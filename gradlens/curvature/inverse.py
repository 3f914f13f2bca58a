"""Products with the inverse of a damped symmetric matrix, by conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.curvature.operator import (
    LinearOperator,
    Products,
    Seed,
    SymmetricMatrix,
    normal_like,
)
from gradlens.numerics.norms import inner, norm
from gradlens.numerics.unavailable import UnavailableError

_Run: TypeAlias = Generator[Tensor, Tensor, tuple[Tensor, float, str]]
"""Conjugate gradients: directions go out, their products come in; x, its residual, and a reason."""

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


@final
class InverseOperator(LinearOperator):
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
        given = [torch.tensor(np.asarray(each), device="cpu") for each in vectors]
        now: dict[int, Tensor] = dict.fromkeys(range(len(given)), products.like)
        runs = [self._run(each.to(products.like)) for each in given]
        found: dict[int, Solution] = {}
        counts = [0] * len(runs)
        waiting: dict[int, Tensor] = {}

        def go_on(number: int, product: Tensor | None) -> None:
            """Give a run the product that it waits for, and take its next vector or its result."""
            try:
                run = runs[number]
                waiting[number] = next(run) if product is None else run.send(product)
                counts[number] += 1
            except StopIteration as end:
                x, residual, reason = end.value
                found[number] = Solution(
                    x.cpu().numpy(), residual, not reason, counts[number], reason
                )

        try:
            if self._rank and self._preconditioner is None:
                self._preconditioner = self._low_rank(products)
            for number in range(len(runs)):
                go_on(number, None)
            while waiting:
                now = waiting.copy()
                waiting.clear()
                images = products.each(now.values())
                for number, (_, image) in zip(now, images, strict=True):
                    go_on(number, image)
        except UnavailableError as error:
            nan = np.full(self.shape[0], np.nan)
            for number in now.keys() - found.keys():
                found[number] = Solution(nan, math.nan, False, counts[number], str(error))
        return [found[number] for number in range(len(runs))]

    def _run(self, b: Tensor) -> _Run:
        size = float(norm(b))
        if not math.isfinite(size):
            return torch.full_like(b, math.nan), math.nan, "the vector contains NaN or Inf"
        x, residual, count, reason = torch.zeros_like(b), b.clone(), 0, ""
        scaled = direction = self._preconditioned(residual)
        square = float(inner(residual, scaled))
        # To half of the tolerance, since the residual of the recurrence differs by rounding.
        while float(norm(residual)) > self.tolerance * size / 2:
            if count >= self.max_products:
                reason = BUDGET
                break
            image = (yield direction) + self.damping * direction
            count += 1
            curvature = float(inner(direction, image))
            if curvature <= 0:
                reason = NOT_POSITIVE
                break
            step = square / curvature
            x += step * direction
            residual -= step * image
            scaled = self._preconditioned(residual)
            before, square = square, float(inner(residual, scaled))
            direction = scaled + square / before * direction
        if size:
            size = float(norm(b - (yield x) - self.damping * x)) / size
        if not reason and size > self.tolerance:
            reason = ROUNDING
        reason = reason.format(residual=size, products=count + 1, damping=self.damping)
        return x, size, reason

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

    def _matvec(self, x: NDArray[Any]) -> NDArray[Any]:
        found = self.solve(x.reshape(-1))
        if not found.converged:
            raise UnavailableError(found.reason)
        return found.vector

    def _matmat(self, X: NDArray[Any]) -> NDArray[Any]:  # noqa: N803 (scipy's name)
        found = self.solve_many(X.T)
        for each in found:
            if not each.converged:
                raise UnavailableError(each.reason)
        return np.stack([each.vector for each in found], axis=1)

    def _adjoint(self) -> InverseOperator:
        return self

    def _transpose(self) -> InverseOperator:
        return self
