"""Orthogonalisation against an orthonormal basis."""

from __future__ import annotations

from torch import Tensor

NEGLIGIBLE = 1e-10
"""What is left of a vector after orthogonalisation, relative to it, when that is only rounding."""


def projected_out(vector: Tensor, basis: Tensor) -> Tensor:
    """``vector`` ``[D]`` without its components along the orthonormal rows of ``basis`` ``[m, D]``.

    Rounding relative to what is taken away remains.
    """
    return vector - basis.T @ (basis @ vector)


def direction(vector: Tensor, basis: Tensor) -> Tensor | None:
    """Unit vector of what ``basis`` doesn't span of ``vector``; None where that is rounding.

    Twice is enough to be orthogonal to rounding (Parlett, 1998, Sec. 6.9).
    """
    rest = projected_out(vector, basis)
    size = float(rest.norm())
    if size <= NEGLIGIBLE * float(vector.norm()):
        return None
    rest = projected_out(rest / size, basis)
    return rest / rest.norm()
