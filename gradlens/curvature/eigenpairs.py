"""The outermost eigenvalues of a symmetric matrix, by Lanczos' method with thick restarts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.curvature.operator import Products, Seed, SymmetricMatrix, direction, normal_like
from gradlens.numerics.norms import inner, norm
from gradlens.numerics.unavailable import UnavailableError
from gradlens.stateful import State

Which: TypeAlias = Literal["largest", "smallest", "magnitude"]

DENSE = 32
"""Matrices up to this size are solved completely, by as many products.

A search takes ten products at least, and usually more; this is exact, and hardly dearer.
"""

EXPLORATION = 8
"""Directions that an exploring search adds to the start vectors at least.

A trade-off: each takes a product, and a search that starts from good guesses and stops at once
would miss an eigenvalue further out, whose eigenvector they have no component of.
"""

SUBSPACE_BYTES = 192 * 2**20
"""Memory of a subspace of 20 vectors and its images, above which it is restarted earlier.

A trade-off of memory against products: 192 MiB hold those of 1.2 million parameters in float32. Of
larger matrices there are fewer, but never less than 3·(k + 1).
"""

MARGIN = 2.0
"""A margin of the error that is estimated from the gap to the next eigenvalue.

That eigenvalue is one of an earlier matrix: the gap may have become smaller, to half at most.
"""

FOLLOWING = 8
"""Products in which the last pairs must be found again; otherwise there is a search in full.

A search in full takes ten products at least: beyond that number, following saves nothing.
"""

_BUDGET = "not converged within {} products"
_PRECISION = "the residual is at rounding level, but above the tolerance relative to the eigenvalue"


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues ``values`` ``[k]``, outermost first, and unit eigenvectors ``[D, k]``.

    ``residuals`` ``[k]`` are ‖Hv − λv‖: an eigenvalue lies that close to λ. ``converged`` says
    that each is within the tolerance relative to the size of λ, or that λ is zero to rounding; if
    not, ``reason`` says why. ``products`` counts the products with H.

    ``units`` are the eigenvectors as they were computed, k tensors ``[D]``; none if a product had
    NaN or Inf. ``next_value`` is the next eigenvalue found, and NaN if there is none. ``guesses``
    are the products with the vectors over their norms, which is one step of power iteration: they
    are better to start from.
    """

    values: NDArray[np.float64]
    residuals: NDArray[np.float64]
    converged: bool
    products: int
    size: int = field(repr=False)
    reason: str = ""
    units: Sequence[Tensor] = field(default=(), repr=False)
    next_value: float = field(default=math.nan, repr=False)
    guesses: Sequence[Tensor] = field(default=(), repr=False)

    @property
    def vectors(self) -> NDArray[np.float64]:
        """The eigenvectors ``[D, k]`` in float64, NaN without any."""
        if not self.units:
            return np.full((self.size, len(self.values)), np.nan)
        return np.stack([unit.to("cpu", torch.float64).numpy() for unit in self.units], axis=1)


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
    found after ``max_products`` is returned unconverged, as are NaNs with their ``reason`` where
    there are no products.

    The subspace grows by the residual of the first unconverged pair and is restarted with the
    best Ritz vectors (Wu and Simon, 2000, Alg. 1). It starts from k + 1 independent vectors, so
    that multiple eigenvalues are all found. The first k count as converged only if the next
    eigenvalue can't be one of them, given its residual. Vectors are of the matrix's own precision.

    Raises ``ValueError`` for k < 1, a ``start`` of another size, fewer than k + 1 products.
    """
    size = matrix.shape[0]
    if start is not None and len(start) != size:
        raise ValueError(f"start has {len(start)} rows, the matrix has {size}")
    given: Any = [] if start is None else start.reshape(size, -1).T[: max(k, 0)]
    guesses = [torch.tensor(each, device="cpu") for each in given]
    return ritz_pairs(matrix, k, which, tolerance, max_products, guesses, seed)


def ritz_pairs(
    matrix: SymmetricMatrix,
    k: int,
    which: Which,
    tolerance: float,
    max_products: int,
    guesses: Sequence[Tensor],
    seed: Seed,
    exploration: int = EXPLORATION,
    next_value: float = math.nan,
) -> Eigenpairs:
    """As ``eigenpairs``, from at most k ``guesses`` ``[D]`` and random vectors for the others.

    Without ``exploration``, it starts from the k guesses alone, and stops as soon as each pair has
    converged: the eigenvalues are the ones nearest to the guesses', and need not be the outermost.

    With ``next_value``, an estimate of the next eigenvalue, a pair has converged if the error of
    its eigenvalue is within the tolerance, as far as it can be estimated from the residual and the
    gap to other eigenvalues. That error is much smaller than the residual.
    """
    products = Products(matrix, own_precision=True)
    k = _checked(k, products.size, which, max_products)
    generator = np.random.default_rng(seed)
    search = _Search(products, k, which, tolerance, max_products, exploration, next_value)
    try:
        search.begin(guesses, generator)
        while not search.finished():
            search.expand(generator)
    except UnavailableError as error:
        nan = np.full(k, np.nan)
        return Eigenpairs(nan, nan, False, products.count, products.size, str(error))
    return search.result()


@dataclass(eq=False)
class _Search:
    """A growing orthonormal ``basis``, its ``images`` under H, and the Ritz pairs.

    ``ritz`` are the eigenvalues of H in the subspace, the outermost first, and the columns of
    ``small`` ``[m, m]`` their eigenvectors in the coordinates of the basis. The first k pairs are
    the result; ``tracked`` pairs, one more in an exploration, have residuals checked. Residuals
    are computed when they are needed: each takes a pass over all of basis and images.
    """

    products: Products
    k: int
    which: Which
    tolerance: float
    max_products: int
    exploration: int
    next_value: float
    explored: int = 0
    basis: list[Tensor] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    _projected: NDArray[Any] = field(default_factory=lambda: np.empty((0, 0)))
    ritz: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    small: NDArray[Any] = field(default_factory=lambda: np.empty((0, 0)))
    _residuals: dict[int, tuple[Tensor, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.products.size
        self.tracked = min(self.k + 1 if self.exploration else self.k, size)
        fitting = SUBSPACE_BYTES // (2 * size * self.products.dtype.itemsize)
        self.capacity = min(max(3 * self.tracked, min(fitting, 20)), size)

    def begin(self, start: Sequence[Tensor], generator: np.random.Generator) -> None:
        guesses = [each.to(self.products.device, self.products.dtype) for each in start]
        if self.products.size <= min(DENSE, self.max_products):
            units = torch.eye(self.products.size, dtype=self.products.dtype, device="cpu")
            guesses = list(units.to(self.products.device))
        starts: list[Tensor] = []
        for guess in [*guesses, *[None] * (self.tracked - len(guesses))]:
            starts.append(self._unit(guess, starts, generator))
        for unit, image in self.products.each(starts):
            self._add(unit, image)
        self._solve()

    def expand(self, generator: np.random.Generator) -> None:
        """Add one more direction: the residual of the first pair that hasn't converged."""
        if len(self.basis) == self.capacity:
            self._restart()
        open_pairs = (pair for pair in range(self.tracked) if not self._settled(pair))
        residual, _ = self._residual(next(open_pairs, self.tracked - 1))
        unit = self._unit(residual, self.basis, generator)
        self._add(unit, self.products(unit))
        self.explored += 1
        self._solve()

    def finished(self) -> bool:
        return self._found() or self.products.count >= self.max_products

    def result(self) -> Eigenpairs:
        reason, columns = self._reason(), self.small.T[: self.k]
        units = [self._combined(self.basis, column) for column in columns]
        return Eigenpairs(
            self.ritz[: self.k].copy(),
            np.array([self._residual(pair)[1] for pair in range(self.k)]),
            not reason,
            self.products.count,
            self.products.size,
            reason,
            units,
            float(self.ritz[self.k]) if len(self.ritz) > self.k else math.nan,
            [self._guess(*each) for each in zip(units, columns, strict=True)],
        )

    def _guess(self, vector: Tensor, column: NDArray[Any]) -> Tensor:
        """Hv over its norm, or the vector itself if that is zero."""
        image = self._combined(self.images, column)
        size = float(norm(image))
        return image.div_(size) if size > 0 else vector

    def _unit(
        self, vector: Tensor | None, basis: Sequence[Tensor], generator: np.random.Generator
    ) -> Tensor:
        """What a vector adds to a basis, or a random one instead; of norm one."""
        unit = None if vector is None else direction(vector, basis)
        while unit is None:
            unit = direction(normal_like(self.products.like, generator), basis)
        return unit

    def _add(self, unit: Tensor, image: Tensor) -> None:
        self.basis.append(unit)
        self.images.append(image)
        column = torch.stack([inner(row, image) for row in self.basis])
        self._projected = np.pad(self._projected, (0, 1))
        self._projected[:, -1] = self._projected[-1, :] = column.cpu().double().numpy()

    def _solve(self) -> None:
        ritz, small = np.linalg.eigh(self._projected)
        order = np.argsort(-outwardness(ritz, self.which), kind="stable")
        self.ritz, self.small = ritz[order], small[:, order]
        self._residuals = {}

    def _residual(self, pair: int) -> tuple[Tensor, float]:
        """Hv − λv of a Ritz pair, and its norm."""
        if pair not in self._residuals:
            column = self.small[:, pair]
            residual = self._combined(self.images, column)
            for row, factor in zip(self.basis, column * self.ritz[pair], strict=True):
                residual.sub_(row, alpha=float(factor))
            self._residuals[pair] = residual, float(norm(residual))
        return self._residuals[pair]

    def _error(self, pair: int) -> float:
        """A bound for the distance of a Ritz value from an eigenvalue, or an estimate of it.

        The residual is a bound. If all other eigenvalues are further away than a gap, so is its
        square over the gap (Parlett, 1998, Theorem 11.7.1). A gap counts up to the value's own
        size, so that an estimate of a fraction f of the value bounds the residual, too: it is at
        most √(f/``MARGIN``) of the value.
        """
        _, residual = self._residual(pair)
        if math.isnan(self.next_value):
            return residual
        others = [*np.delete(self.ritz[: self.k], pair), self.next_value, 0.0]
        gap = float(np.abs(self.ritz[pair] - others).min())
        return min(residual, MARGIN * residual**2 / gap) if gap > 0 else residual

    def _combined(self, vectors: Sequence[Tensor], column: NDArray[Any]) -> Tensor:
        combined = vectors[0] * float(column[0])
        for vector, factor in zip(vectors[1:], column[1:], strict=True):
            combined.add_(vector, alpha=float(factor))
        return combined

    def _restart(self) -> None:
        """Keeps the best Ritz vectors as the basis."""
        kept = self.tracked + (self.capacity - self.tracked) // 3
        columns = self.small.T[:kept]
        self.basis = [self._combined(self.basis, column) for column in columns]
        self.images = [self._combined(self.images, column) for column in columns]
        self.ritz = self.ritz[:kept]
        self.small = np.eye(kept)
        self._projected = np.diag(self.ritz)

    def _settled(self, pair: int) -> bool:
        """Whether a pair has converged, or its residual is nothing but rounding."""
        return self._error(pair) <= max(
            self.tolerance * abs(self.ritz[pair]), self.products.rounding
        )

    def _found(self) -> bool:
        """Whether the pairs have converged and are the outermost, or the basis is complete."""
        if len(self.basis) == self.products.size:
            return True
        if self.explored < self.exploration or not all(map(self._settled, range(self.k))):
            return False
        if self.tracked == self.k or self._settled(self.k):
            return True
        last, following = outwardness(self.ritz[self.k - 1 : self.k + 1], self.which)
        reach = following + self._residual(self.k)[1]
        return bool(reach <= last + self.tolerance * abs(last))

    def _reason(self) -> str:
        """Why the result is not converged; empty if it is."""
        if not self._found():
            return _BUDGET.format(self.products.count)
        rounding = self.products.rounding
        for pair, size in enumerate(np.abs(self.ritz[: self.k])):
            is_zero = max(size, self._residual(pair)[1]) <= rounding
            if not (is_zero or self._error(pair) <= self.tolerance * size):
                return _PRECISION
        return ""


def outwardness(values: NDArray[Any], which: Which) -> NDArray[Any]:
    """Numbers that are larger, the further out an eigenvalue lies."""
    if which == "magnitude":
        return np.abs(values)
    return values if which == "largest" else -values


def _checked(k: int, size: int, which: Which, max_products: int) -> int:
    if which not in ("largest", "smallest", "magnitude"):
        raise ValueError(f"which is {which!r}: pass 'largest', 'smallest' or 'magnitude'")
    if k < 1:
        raise ValueError(f"k is {k}: ask for one eigenvalue at least")
    k = min(k, size)
    if max_products < min(k + 1, size):
        raise ValueError(f"{k} eigenvalues need more than {max_products} products")
    return k


@dataclass(frozen=True)
class _Last:
    """What the last search of a matrix has left: where the next one starts, and what it expects."""

    vectors: Sequence[Tensor] = ()
    next: float = math.nan
    followed: int = 0


class WarmStartedEigenpairs:
    """``eigenpairs`` from step to step, starting from products with the last eigenvectors.

    There may be several matrices, such as the blocks of one, each with a name.

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
        self._last: dict[str, _Last] = {}

    def __call__(
        self,
        matrix: SymmetricMatrix,
        seed: int,
        k: int = 1,
        which: Which = "largest",
        name: str = "",
    ) -> Eigenpairs:
        """The outermost eigenpairs of a matrix, which may have changed since the last call."""
        last = self._last.get(name, _Last())
        # Parameters may have been added.
        fits = all(len(vector) == matrix.shape[0] for vector in last.vectors)
        start, spent = last.vectors if fits else (), 0
        if start and last.followed + 1 < self._search_interval:
            budget = min(FOLLOWING * k, self._max_products)
            found = ritz_pairs(matrix, k, which, self._tolerance, budget, start, seed, 0, last.next)
            outermost, following = outwardness(np.array([found.values[-1], last.next]), which)
            if found.converged and not outermost < following:
                self._last[name] = replace(last, vectors=found.guesses, followed=last.followed + 1)
                return found
            start, spent = found.guesses, found.products
        found = ritz_pairs(matrix, k, which, self._tolerance, self._max_products, start, seed)
        self._last[name] = _Last(found.guesses, found.next_value)
        return replace(found, products=spent + found.products)

    def state_dict(self) -> State:
        """The vectors of the last call, which are never changed in place, and what it needs."""
        return {
            name: {"vectors": [*last.vectors], "next": last.next, "followed": last.followed}
            for name, last in self._last.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._last = {name: _Last(**each) for name, each in state.items()}
