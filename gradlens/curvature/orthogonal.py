"""Orthogonalisation against an orthonormal basis."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradlens.numerics.norms import inner

NEGLIGIBLE = 1e-10
"""What is left of a vector after orthogonalisation, relative to it, when that is only rounding.

That is in float64; in lower precisions it is ``_ROUNDING`` times theirs.
"""

_ROUNDING = 64.0
_CANCELLED = 0.7
"""Where less than this is left of a vector, digits are lost, and once is not enough."""


def norm(vector: Tensor) -> float:
    """Euclidean norm, summed as inner products are."""
    return float(inner(vector, vector).sqrt())


def projected_out(vector: Tensor, basis: Iterable[Tensor]) -> Tensor:
    """``vector`` ``[D]`` without its components along the orthonormal rows of ``basis``.

    Row by row, as in Gram and Schmidt's modified method. Rounding relative to what is taken away
    remains.
    """
    rest = vector.clone()
    for row in basis:
        rest.addcmul_(row, inner(row, rest), value=-1)
    return rest


def direction(vector: Tensor, basis: Iterable[Tensor]) -> Tensor | None:
    """Unit vector of what ``basis`` doesn't span of ``vector``; None where that is rounding.

    Twice is enough to be orthogonal to rounding, and once where nothing cancels (Parlett, 1998,
    Sec. 6.9).
    """
    size = norm(vector)
    rest = projected_out(vector, basis)
    left = norm(rest)
    if left <= max(NEGLIGIBLE, _ROUNDING * torch.finfo(vector.dtype).eps) * size:
        return None
    if left < _CANCELLED * size:
        rest = projected_out(rest / left, basis)
        left = norm(rest)
    return rest / left
