"""Products with the inverse of a damped symmetric matrix, by conjugate gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.curvature.operator import LinearOperator, Products, SymmetricMatrix
from gradlens.numerics.norms import inner, norm
from gradlens.numerics.unavailable import UnavailableError

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
    ``damping`` must make the matrix positive definite. Numbers are of float64.

    Raises ``ValueError`` for a negative damping; products raise ``UnavailableError`` where they
    don't converge.
    """

    def __init__(
        self,
        matrix: SymmetricMatrix,
        damping: float,
        *,
        tolerance: float = 1e-6,
        max_products: int = 300,
    ) -> None:
        if not 0 <= damping < math.inf:
            raise ValueError(f"damping={damping}: pass a number that isn't negative")
        self.matrix = matrix
        self.damping = damping
        self.tolerance = tolerance
        self.max_products = max_products
        size = matrix.shape[0]
        # The stubs have only the constructor from functions.
        super().__init__(np.dtype(np.float64), (size, size))  # type: ignore[call-arg]

    def solve(self, vector: NDArray[Any]) -> Solution:
        """The solution x of (H + damping·I)x = ``vector`` ``[D]``, with its residual.

        By conjugate gradients (Hestenes and Stiefel, 1952, Sec. 3). Where these don't converge, x
        is what they have come to. NaN with the ``reason`` where there are no products.
        """
        if np.shape(vector) != (self.shape[0],):
            raise ValueError(f"the vector has shape {np.shape(vector)}, not ({self.shape[0]},)")
        products = Products(self.matrix)
        try:
            given = torch.tensor(np.asarray(vector), device="cpu")
            return self._solve(products, given.to(products.like))
        except UnavailableError as error:
            nan = np.full(self.shape[0], np.nan)
            return Solution(nan, math.nan, False, products.count, str(error))

    def _solve(self, products: Products, b: Tensor) -> Solution:
        size = float(norm(b))
        if not math.isfinite(size):
            raise UnavailableError("the vector contains NaN or Inf")
        x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
        square = float(inner(residual, residual))
        reason = ""
        # To half of the tolerance, since the residual of the recurrence differs by rounding.
        while math.sqrt(square) > self.tolerance * size / 2:
            if products.count >= self.max_products:
                reason = BUDGET
                break
            image = products(direction) + self.damping * direction
            curvature = float(inner(direction, image))
            if curvature <= 0:
                reason = NOT_POSITIVE
                break
            step = square / curvature
            x += step * direction
            residual -= step * image
            before, square = square, float(inner(residual, residual))
            direction = residual + square / before * direction
        if size:
            size = float(norm(b - products(x) - self.damping * x)) / size
        if not reason and size > self.tolerance:
            reason = ROUNDING
        reason = reason.format(residual=size, products=products.count, damping=self.damping)
        return Solution(x.cpu().numpy(), size, not reason, products.count, reason)

    def _matvec(self, x: NDArray[Any]) -> NDArray[Any]:
        found = self.solve(x.reshape(-1))
        if not found.converged:
            raise UnavailableError(found.reason)
        return found.vector

    def _adjoint(self) -> InverseOperator:
        return self

    def _transpose(self) -> InverseOperator:
        return self
