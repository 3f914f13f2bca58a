"""Norms that don't lose digits."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor


def norm(tensor: Tensor) -> Tensor:
    """Euclidean norm of a dense or sparse tensor, in its precision, at least in single precision.

    The squares of vanishing or huge elements may leave the range of that precision; the norm is
    right nevertheless.
    """
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    result, accumulated = _precisions(tensor.dtype, tensor.device.type)
    found = torch.linalg.vector_norm(tensor, dtype=accumulated).to(result)
    # On other devices, a look at the value would have to wait for them.
    if found.device.type != "cpu" or _lowest(result) <= float(found) < math.inf:
        return found
    return _rescued(tensor.reshape(1, -1).to(result), found.reshape(1))[0]


def row_norms(matrix: Tensor) -> Tensor:
    """``norm`` of each row of ``[N, M]``, as ``[N]``."""
    result, accumulated = _precisions(matrix.dtype, matrix.device.type)
    found = torch.linalg.vector_norm(matrix, dim=1, dtype=accumulated).to(result)
    if found.device.type != "cpu" or not len(found):
        return found
    low, high = torch.aminmax(found)
    if _lowest(result) <= float(low) and float(high) < math.inf:
        return found
    return _rescued(matrix.to(result), found)


@cache
def _precisions(dtype: torch.dtype, device: str) -> tuple[torch.dtype, torch.dtype]:
    """That of a norm, and that of the sum of squares."""
    result = torch.promote_types(dtype, torch.float32)
    # On a processor, double precision takes ten times as long.
    return result, result if device in ("cpu", "mps") else torch.float64


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
        rows = matrix[odd]
        norms = norms.index_put((odd,), torch.linalg.vector_norm(rows.mul_(scale), dim=1) / scale)
    return norms
