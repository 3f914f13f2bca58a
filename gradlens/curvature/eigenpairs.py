"""The outermost eigenvalues of a symmetric matrix, by Lanczos' method with thick restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.curvature.orthogonal import direction
from gradlens.curvature.probes import Seed, gaussian
from gradlens.curvature.products import NotFiniteError, Products, SymmetricMatrix

Which: TypeAlias = Literal["largest", "smallest", "magnitude"]

DENSE = 32
"""Matrices up to this size are solved completely."""

EXPLORATION = 8
"""Directions tried at least: a good start must not hide an eigenvalue it knows nothing of."""

_ROUNDING = 16.0
"""A residual below this many rounding errors of the matrix is as small as it gets."""

_BUDGET = "not converged within {} products"
_PRECISION = "the residual is at rounding level, but above the tolerance relative to the eigenvalue"


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues ``values`` ``[k]``, outermost first, and unit eigenvectors ``[D, k]``.

    ``residuals`` ``[k]`` are ‖Hv − λv‖: an eigenvalue lies that close to λ. ``converged`` says
    that each is within the tolerance relative to the size of λ, or that λ is zero to rounding; if
    not, ``reason`` says why. ``products`` counts the products with H.
    """

    values: NDArray[np.float64]
    vectors: NDArray[np.float64]
    residuals: NDArray[np.float64]
    converged: bool
    products: int
    reason: str = ""


def eigenpairs(
    matrix: SymmetricMatrix,
    k: int = 1,
    which: Which = "largest",
    *,
    tolerance: float = 1e-5,
    max_products: int = 300,
    start: NDArray[Any] | None = None,
    seed: Seed = 0,
) -> Eigenpairs:
    """The k largest or smallest (algebraic) or largest-in-magnitude eigenvalues and eigenvectors.

    Sorted outermost first: descending, ascending, or descending in magnitude; at most D of them.
    ``start`` ``[D, any]`` holds guesses of eigenvectors, such as those found a step ago. What is
    found after ``max_products`` is returned unconverged, as are NaNs for a matrix that has them.

    The subspace grows by the residual of the first unconverged pair and is restarted with the
    best Ritz vectors (Wu and Simon, 2000, Alg. 1). It starts from k + 1 independent vectors, so
    that multiple eigenvalues are all found; the pair after the last must be out of reach before
    the others count as converged.

    Raises ``ValueError`` for k < 1, a ``start`` of another size, fewer than k + 1 products.
    """
    products = Products(matrix)
    k = _checked(k, products.size, which, max_products, start)
    generator = np.random.default_rng(seed)
    search = _Search(products, k, which, tolerance, max_products)
    try:
        search.begin(start, generator)
        while not search.finished():
            search.expand(generator)
    except NotFiniteError as error:
        return _undefined(products, k, str(error))
    return search.result()


class _Search:
    """A growing orthonormal ``basis`` ``[m, D]``, its ``images`` under H, and the Ritz pairs.

    Eigenvalues of H in the subspace are ``ritz``, the wanted ones first; ``small`` ``[m, m]``
    holds their eigenvectors in the coordinates of the basis as columns.
    """

    def __init__(
        self, products: Products, k: int, which: Which, tolerance: float, max_products: int
    ) -> None:
        self.products = products
        self.k = k
        self.which = which
        self.tolerance = tolerance
        self.max_products = max_products
        self.watched = min(k + 1, products.size)
        self.capacity = min(max(3 * self.watched, 20), products.size)
        self.dense = products.size <= min(DENSE, max_products)
        self.explored = 0
        rows = products.size if self.dense else self.capacity
        self._memory = torch.empty(
            2, rows, products.size, dtype=torch.float64, device=products.device
        )
        self._filled = 0
        self._projected = np.empty((0, 0))
        self.ritz = np.empty(0)
        self.small = np.empty((0, 0))
        self.residuals = np.empty(0)
        self._residuals = torch.empty(0)

    @property
    def basis(self) -> Tensor:
        return self._memory[0, : self._filled]

    @property
    def images(self) -> Tensor:
        return self._memory[1, : self._filled]

    def begin(self, start: NDArray[Any] | None, generator: np.random.Generator) -> None:
        guesses: list[Tensor | None] = [None] * self.watched
        if self.dense:
            guesses = list(torch.eye(self.products.size, dtype=torch.float64))
        elif start is not None:
            known = self.products.place(start.reshape(self.products.size, -1)).T[: self.k]
            usable = [guess for guess in known if bool(guess.isfinite().all())]
            guesses = [*usable, *guesses[len(usable) :]]
        for guess in guesses:
            self._add(guess, generator)
        self._solve()

    def expand(self, generator: np.random.Generator) -> None:
        """One more direction: the residual of the first pair that has far to go."""
        if self._filled == self.capacity:
            self._restart()
        open_pairs = np.flatnonzero(~self._settled())
        pair = int(open_pairs[0]) if len(open_pairs) else self.watched - 1
        self._add(self._residuals[pair], generator)
        self.explored += 1
        self._solve()

    def finished(self) -> bool:
        if self._complete() or self.products.count >= self.max_products:
            return True
        return self._wanted_settled() and self._searched()

    def result(self) -> Eigenpairs:
        reason = self._reason()
        return Eigenpairs(
            self.ritz[: self.k].copy(),
            (self.basis.T @ self._columns(slice(0, self.k))).cpu().numpy(),
            self.residuals[: self.k].copy(),
            not reason,
            self.products.count,
            reason,
        )

    def _add(self, vector: Tensor | None, generator: np.random.Generator) -> None:
        unit = None if vector is None else direction(vector.to(self.basis.device), self.basis)
        while unit is None:
            unit = direction(gaussian(self.products, generator), self.basis)
        image = self.products(unit)
        self._memory[0, self._filled] = unit
        self._memory[1, self._filled] = image
        self._filled += 1
        column = (self.basis @ image).cpu().numpy()
        self._projected = _bordered(self._projected, column)

    def _solve(self) -> None:
        ritz, small = np.linalg.eigh(self._projected)
        order = np.argsort(-_outwardness(ritz, self.which), kind="stable")
        self.ritz, self.small = ritz[order], small[:, order]
        columns = self._columns(slice(0, self.watched))
        values = torch.tensor(self.ritz[: self.watched], device=self.basis.device)
        self._residuals = columns.T @ self.images
        self._residuals -= (columns * values).T @ self.basis
        self.residuals = self._residuals.norm(dim=1).cpu().numpy()

    def _restart(self) -> None:
        """Keeps the best Ritz vectors as the basis."""
        kept = slice(0, self.watched + (self.capacity - self.watched) // 3)
        columns = self._columns(kept)
        for rows in (0, 1):
            self._memory[rows, kept] = columns.T @ self._memory[rows]
        self._filled = kept.stop
        self.ritz = self.ritz[kept]
        self.small = np.eye(kept.stop)
        self._projected = np.diag(self.ritz)

    def _columns(self, which: slice) -> Tensor:
        return torch.tensor(self.small[:, which], device=self.basis.device)

    def _floor(self) -> float:
        return _ROUNDING * self.products.eps * self.products.norm

    def _settled(self) -> NDArray[np.bool_]:
        """Which of the watched pairs can't, or needn't, become better."""
        sizes = np.abs(self.ritz[: self.watched])
        return self.residuals <= np.maximum(self.tolerance * sizes, self._floor())

    def _wanted_settled(self) -> bool:
        return self._complete() or bool(self._settled()[: self.k].all())

    def _complete(self) -> bool:
        return self._filled == self.products.size

    def _searched(self) -> bool:
        return self._complete() or (self.explored >= EXPLORATION and self._next_is_out_of_reach())

    def _next_is_out_of_reach(self) -> bool:
        if self.watched == self.k or bool(self._settled()[self.k]):
            return True
        last, following = _outwardness(self.ritz[self.k - 1 : self.k + 1], self.which)
        return bool(following + self.residuals[self.k] <= last)

    def _accurate(self) -> bool:
        sizes, residuals = np.abs(self.ritz[: self.k]), self.residuals[: self.k]
        zero = (sizes <= self._floor()) & (residuals <= self._floor())
        return bool(np.all((residuals <= self.tolerance * sizes) | zero))

    def _reason(self) -> str:
        """Why the result is not converged; empty if it is."""
        if not (self._wanted_settled() and self._searched()):
            return _BUDGET.format(self.products.count)
        return "" if self._accurate() else _PRECISION


def _bordered(matrix: NDArray[Any], column: NDArray[Any]) -> NDArray[Any]:
    """The symmetric matrix with one more row and column."""
    size = len(column)
    bordered = np.empty((size, size))
    bordered[:-1, :-1] = matrix
    bordered[:, -1] = bordered[-1, :] = column
    return bordered


def _outwardness(values: NDArray[Any], which: Which) -> NDArray[Any]:
    if which == "magnitude":
        return np.abs(values)
    return values if which == "largest" else -values


def _checked(k: int, size: int, which: Which, max_products: int, start: NDArray[Any] | None) -> int:
    if which not in ("largest", "smallest", "magnitude"):
        raise ValueError(f"which is {which!r}: pass 'largest', 'smallest' or 'magnitude'")
    if k < 1:
        raise ValueError(f"k is {k}: ask for one eigenvalue at least")
    if start is not None and len(start) != size:
        raise ValueError(f"start has {len(start)} rows, the matrix has {size}")
    k = min(k, size)
    if max_products < min(k + 1, size):
        raise ValueError(f"{k} eigenvalues need more than {max_products} products")
    return k


def _undefined(products: Products, k: int, reason: str) -> Eigenpairs:
    return Eigenpairs(
        np.full(k, np.nan),
        np.full((products.size, k), np.nan),
        np.full(k, np.nan),
        False,
        products.count,
        reason,
    )
