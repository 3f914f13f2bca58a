"""Products of a symmetric matrix with vectors, counted and checked, and the vectors for them.

These are random ones, and ones that are orthogonal to others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from gradlens.curvature.operator import CurvatureOperator
from gradlens.numerics.host import on_device
from gradlens.numerics.norms import inner, norm
from gradlens.numerics.unavailable import UnavailableError

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

SymmetricMatrix: TypeAlias = "LinearOperator[Any] | NDArray[Any]"
"""A curvature operator, any other symmetric linear operator, or a matrix ``[D, D]``."""

JOINT_BYTES = 192 * 2**20
"""Memory of products that take one pass through data together.

A trade-off of memory against passes: that of the subspace in which eigenvalues are searched for.
"""

VECTOR_BYTES = 48
"""Memory that each element of these vectors takes at most.

Six float64 numbers: of the vector, its copy in a stack and what it is computed from; and of the
product, the sum over batches, the flat vector and its copy in a stack.
"""

Seed: TypeAlias = int | np.random.Generator
"""A number, or a generator, which continues from its state. Draws are the same on every device."""

NOT_FINITE = "a product of the matrix with a finite vector contains NaN or Inf"
_WITHOUT_FLOAT64 = ("mps",)

_NEGLIGIBLE = 1e-10
"""A remainder that is smaller, relative to the vector, counts as rounding.

Below it, float64 leaves fewer than six right digits of the direction; rounding itself is about
1e-16 for each row of the basis. In lower precisions the bound is ``_ROUNDING`` times theirs.
"""

_ROUNDING = 64.0
"""Rounding errors that count as rounding: one for each row, of which a basis of ``eigenpairs``
has at most 20, or 3·(k + 1)."""

_CANCELLED = 0.7
"""A remainder that is smaller, relative to the vector, is orthogonalised a second time.

It is about 1/√2 (Daniel et al., 1976): below, more than half of the vector's square has cancelled.
"""


class Products:
    """Products of a symmetric matrix with vectors ``[D]``, both tensors of ``dtype`` on ``device``.

    The device is the matrix's own where it has one. The dtype is float64, or with ``own_precision``
    that of a curvature operator. ``count`` is the number of products so far, ``norm`` the largest
    ‖Hv‖/‖v‖ of them, ``eps`` the relative rounding error of the numbers that the products are
    computed in. A call raises ``UnavailableError`` for a product with NaN or Inf.
    """

    def __init__(self, matrix: SymmetricMatrix, own_precision: bool = False) -> None:
        self.dtype, self.device = torch.float64, torch.device("cpu")
        self._multiply: Callable[[Tensor], Tensor]
        self._joint: CurvatureOperator | None = None
        if isinstance(matrix, CurvatureOperator):
            self._multiply, self.size = matrix.multiply, matrix.shape[0]
            self.eps = torch.finfo(matrix.torch_dtype).eps
            self.device = float64_device(matrix.device)
            self._joint = matrix if matrix.joint else None
            if own_precision:
                self.dtype, self.device = matrix.torch_dtype, matrix.device
        else:
            self._multiply, self.size, self.eps = _adapted(matrix)
        self.count = 0
        self.norm = 0.0

    def __call__(self, vector: Tensor) -> Tensor:
        return self._checked(vector, self._multiply(vector))

    def each(self, vectors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each vector ``[D]`` with its product, in their order.

        Of a matrix over data, as many as ``JOINT_BYTES`` hold take one pass, but at least one.
        """
        remaining = iter(vectors)
        while several := list(islice(remaining, self.together())):
            if self._joint is None or len(several) == 1:
                yield from ((vector, self(vector)) for vector in several)
                continue
            found = self._joint.multiply_many(torch.stack(several))
            for vector, product in zip(several, found, strict=True):
                yield vector, self._checked(vector, product)

    def together(self, kept: int = 0) -> int:
        """How many vectors of a matrix over data ``JOINT_BYTES`` hold, and one of any other matrix.

        ``kept`` vectors in float64 are kept for each of them.
        """
        bytes_each = (VECTOR_BYTES + 8 * kept) * self.size
        return 1 if self._joint is None else max(1, JOINT_BYTES // bytes_each)

    def _checked(self, vector: Tensor, product: Tensor) -> Tensor:
        product = product.to(self.device, self.dtype)
        self.count += 1
        size, product_size = float(norm(vector)), float(norm(product))
        if not math.isfinite(product_size):
            raise UnavailableError(NOT_FINITE)
        if size > 0:
            self.norm = max(self.norm, product_size / size)
        return product

    @property
    def rounding(self) -> float:
        """A residual whose norm is at most this is nothing but rounding: 16·``eps``·``norm``.

        Products and combinations of m vectors have errors of about √m roundings, 4.5 for the 20 of
        a search; the rest is a margin.
        """
        return 16 * self.eps * self.norm

    @property
    def like(self) -> Tensor:
        """A tensor ``[D]`` of ``dtype`` on ``device``, whose numbers take no memory."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.size)


def signs_like(like: Tensor, generator: np.random.Generator) -> Tensor:
    """Independent signs ±1 of another tensor's shape, dtype and device."""
    drawn = torch.from_numpy(generator.integers(0, 2, tuple(like.shape), dtype=np.int8))
    return on_device(drawn, like.device, like.dtype).mul_(2).sub_(1)


def normal_like(like: Tensor, generator: np.random.Generator) -> Tensor:
    """Independent standard normal numbers of another tensor's shape, dtype and device.

    As a flat vector, any direction is as likely as any other.
    """
    drawn = torch.from_numpy(generator.standard_normal(tuple(like.shape)))
    return on_device(drawn.to(like.dtype), like.device)


def projected_out(vector: Tensor, basis: Iterable[Tensor]) -> Tensor:
    """``vector`` ``[D]`` without its components along the orthonormal rows of ``basis``.

    By the modified Gram-Schmidt method, row by row. What is left is orthogonal to rounding relative
    to what is taken away.
    """
    rest = vector.clone()
    for row in basis:
        rest.addcmul_(row, inner(row, rest), value=-1)
    return rest


def direction(vector: Tensor, basis: Sequence[Tensor] | Tensor) -> Tensor | None:
    """Unit vector along the part of ``vector`` ``[D]`` that ``basis`` doesn't span.

    ``None`` where that part is nothing but rounding, or not finite. Orthogonalising twice is enough
    for orthogonality to rounding, and once where nothing cancels (Parlett, 1998, Sec. 6.9).
    """
    rest, size = vector, norm(vector)
    left = size
    if len(basis):
        rest = projected_out(vector, basis)
        left = norm(rest)
    least = max(_NEGLIGIBLE, _ROUNDING * torch.finfo(vector.dtype).eps) * size
    if not least < left < torch.inf:
        return None
    if left < _CANCELLED * size:
        rest = projected_out(rest / left, basis)
        left = norm(rest)
    return rest / left


def float64_device(device: torch.device) -> torch.device:
    """The device itself, or the CPU if it has no float64."""
    return torch.device("cpu") if device.type in _WITHOUT_FLOAT64 else device


def _adapted(matrix: SymmetricMatrix) -> tuple[Callable[[Tensor], Tensor], int, float]:
    """The product with a vector on the CPU, the size, and the relative rounding error."""
    if isinstance(matrix, np.ndarray):
        matrix = matrix.astype(np.float64)
    operator: Any = aslinearoperator(cast("Any", matrix))
    rows, columns = operator.shape
    if rows != columns or rows == 0:
        raise ValueError(f"the matrix has shape {[rows, columns]}: pass a square one")
    kind = np.dtype(operator.dtype or np.float64)
    eps = float(np.finfo(kind if kind.kind == "f" else np.float64).eps)
    return lambda vector: torch.tensor(operator.matvec(vector.numpy()), device="cpu"), rows, eps
