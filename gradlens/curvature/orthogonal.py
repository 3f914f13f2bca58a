"""Orthogonalisation against an orthonormal basis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradlens.numerics.norms import inner, norm

NEGLIGIBLE = 1e-10
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
    least = max(NEGLIGIBLE, _ROUNDING * torch.finfo(vector.dtype).eps) * size
    if not least < left < torch.inf:
        return None
    if left < _CANCELLED * size:
        rest = projected_out(rest / left, basis)
        left = norm(rest)
    return rest / left
