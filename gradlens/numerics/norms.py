"""Norms and inner products that don't lose digits."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

_FEW = 2**18
"""Elements whose squares are stored in less time than norms of parts take."""

_PART = 256
"""Squares that are added up one after the other, which leaves all digits."""


def norm(tensor: Tensor) -> Tensor:
    """Euclidean norm of a dense or sparse tensor, in its precision, at least in single precision.

    The squares of vanishing or huge elements may leave the range of that precision; the norm is
    right nevertheless.
    """
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    row = tensor.reshape(1, -1)
    found = _norms(row)
    # On other devices, a look at the value would have to wait for them.
    if found.device.type == "cpu" and not _lowest(found.dtype) <= float(found) < math.inf:
        found = _rescued(row.to(found.dtype), found)
    return found[0]


def row_norms(matrix: Tensor) -> Tensor:
    """``norm`` of each row of ``[N, M]``, as ``[N]``."""
    found = _norms(matrix)
    if found.device.type != "cpu" or not len(found):
        return found
    low, high = torch.aminmax(found)
    if _lowest(found.dtype) <= float(low) and float(high) < math.inf:
        return found
    return _rescued(matrix.to(found.dtype), found)


def squared_row_norms(matrix: Tensor) -> Tensor:
    """Squared Euclidean norm of each row, ``[N, M] -> [N]``, of squares within the range.

    Pairwise sums: ``torch.linalg.vector_norm`` has four right digits of ten million elements.
    """
    if matrix.numel() > _FEW:
        matrix = _norms_of_parts(matrix)
    return torch.linalg.vecdot(matrix, matrix)


def _norms_of_parts(matrix: Tensor) -> Tensor:
    """``[N, M]`` to ``[N, M / _PART]``, rounded up."""
    parts = matrix.shape[1] // _PART
    whole = matrix[:, : parts * _PART].unflatten(1, (parts, _PART))
    rest = matrix[:, None, parts * _PART :]
    return torch.cat([torch.linalg.vector_norm(each, dim=2) for each in (whole, rest)], dim=1)


def inner(one: Tensor, other: Tensor) -> Tensor:
    """Inner product of two vectors ``[D]``, a scalar tensor, to rounding in any precision.

    Pairwise sums: a library's dot product is off by hundreds of float32's rounding errors at a
    million elements.
    """
    if one.dtype == torch.float64:
        return torch.dot(one, other)
    return (one * other).sum()


def _norms(matrix: Tensor) -> Tensor:
    """Of rows whose squares are within the range of the result's precision."""
    device, result = matrix.device.type, torch.promote_types(matrix.dtype, torch.float32)
    if device == "cpu":
        return squared_row_norms(matrix.to(result)).sqrt_()
    accumulated = result if device == "mps" else torch.float64
    return torch.linalg.vector_norm(matrix, dim=1, dtype=accumulated).to(result)


@cache
def _lowest(dtype: torch.dtype) -> float:
    """Norms from here on come from squares that have all their digits."""
    limits = torch.finfo(dtype)
    return math.sqrt(limits.tiny / limits.eps)


def _rescued(matrix: Tensor, norms: Tensor) -> Tensor:
    """The norms of its rows, those anew that may be wrong."""
    # Elements of any size times this have squares within the range.
    factor = 2.0 ** (100 if matrix.dtype == torch.float32 else 700)
    for odd, scale in ((norms < _lowest(matrix.dtype), factor), (norms == torch.inf, 1 / factor)):
        norms = norms.index_put((odd,), _norms(matrix[odd].mul_(scale)) / scale)
    return norms
