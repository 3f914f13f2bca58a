"""Norms and inner products that don't lose digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from gradlens.numerics.shards import over_parts, own_part, own_parts
from gradlens.numerics.tensors import double, in_groups, is_small
from gradlens.torch_private import foreach

_FEW = 2**18
"""Up to so many elements, all squares are stored; above, first the norms of parts are taken.

Measured on one core: squares of more elements leave the processor's cache, and take twice as long
as norms of parts at 2**19 and five times as long at 2**20.
"""

_PART = 256
"""Elements of a part, of which ``torch.linalg.vector_norm`` adds up the squares in turn.

Measured in float32, of random elements and of equal ones: its error is 1 and 2 roundings at 256
elements, and 2 and 91 at 2**14.
"""

_PRODUCTS = 2**14
"""Products that are left to the processor's matrix library, which loses digits of more.

Measured in float32, of random elements and of equal ones: its error is 1 and 25 roundings at 2**14
products, and 11 and 1900 at 2**20. Fewer at once would be more exact, and slower.
"""

MODERATE = 1e6
"""The largest size of numbers whose squares stay in float32: these may be smaller by 1e26."""


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Euclidean norms of dense, sparse or distributed tensors.

    They are in double precision, or in that of large tensors. The squares of vanishing or huge
    elements may leave the range of that precision; the norm is right nevertheless.
    """
    return over_parts(tensors, _own_norms(own_parts(tensors)), _norms_of_parts)


def distances(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Norms of the differences of dense tensors, as ``norms``.

    Of large ones on the processor, one is stored at a time.
    """
    pairs = [*zip(own_parts(ones), own_parts(others), strict=True)]
    found = in_groups(pairs, _keys([one for one, _ in pairs]), _own_distances)
    return over_parts(ones, found, _norms_of_parts)


def _own_distances(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterable[Tensor]:
    ones, others = zip(*pairs, strict=True)
    alone = len(pairs) == 1
    return _own_norms([ones[0] - others[0]] if alone else foreach("sub", ones, others))


def norm(tensor: Tensor) -> Tensor:
    """The norm of a single tensor, in its precision, at least in single."""
    return over_parts([tensor], [_norm(own_part(tensor))], _norms_of_parts)[0]


def _norms_of_parts(parts: Tensor) -> Tensor:
    return row_norms(parts.T)


def _own_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    return in_groups(tensors, _keys(tensors), _norms_at_once)


def _keys(tensors: Sequence[Tensor]) -> list[str | None]:
    """The same for tensors that one operation is for; ``None`` for those computed in turn.

    On the processor, that operation converts them to double precision in memory of their own.
    """
    dense = [each.layout == torch.strided and each.is_floating_point() for each in tensors]
    return [
        "together" if each_dense and (each.is_cuda or is_small(each)) else None
        for each, each_dense in zip(tensors, dense, strict=True)
    ]


def _norms_at_once(tensors: Sequence[Tensor]) -> Iterable[Tensor]:
    if _keys(tensors[:1]) == [None]:
        return [_norm(tensors[0])]
    return foreach("norm", tensors, 2, torch.float64)


def _norm(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return row_norms(tensor.reshape(1, -1))[0]


def row_norms(matrix: Tensor) -> Tensor:
    """``norm`` of each row, ``[N, M] -> [N]``."""
    found = _norms(matrix)
    # Reading a value from another device would wait for it; there, sums are in float64.
    if found.device.type != "cpu" or is_small(matrix) or not len(found):
        return found
    low, high = torch.aminmax(found) if len(found) > 1 else (found, found)
    if _lowest(found.dtype) <= float(low) and float(high) < math.inf:
        return found
    return _rescued(matrix.to(found.dtype), found)


def squared_row_norms(matrix: Tensor) -> Tensor:
    """Squared Euclidean norm of each row, ``[N, M] -> [N]``, of squares within the range.

    Right to a few roundings for any M, where ``torch.linalg.vector_norm`` of ten million elements
    in float32 has four right digits.
    """
    if matrix.numel() > _FEW:
        matrix = _norms_by_part(matrix)
    return torch.linalg.vecdot(matrix, matrix)


def _norms_by_part(matrix: Tensor) -> Tensor:
    """``[N, M]`` to ``[N, M / _PART]``, rounded up."""
    parts = matrix.shape[1] // _PART
    whole = matrix[:, : parts * _PART].unflatten(1, (parts, _PART))
    rest = matrix[:, None, parts * _PART :]
    return torch.cat([torch.linalg.vector_norm(each, dim=2) for each in (whole, rest)], dim=1)


EXPONENTS: Mapping[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF0000000000000),
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
"""Integers of the same size, and the bits of these that hold a number's exponent."""


def scale_of(tensor: Tensor) -> Tensor:
    """A power of two near the largest absolute value, a scalar of the tensor's precision.

    Over it, squares and products are within the range; a division by a power of two is exact. One
    for no elements, NaN and Inf.
    """
    if not tensor.numel():
        return tensor.new_ones(())
    limits = torch.finfo(tensor.dtype)
    if tensor.device.type == "cpu":  # where reading a number is cheaper than an operation
        low, high = map(float, torch.aminmax(tensor))
        size = max(-low, high)
        is_usual = limits.tiny <= size <= limits.max / 2
        return tensor.new_tensor(math.ldexp(1.0, math.frexp(size)[1]) if is_usual else 1.0)
    largest = torch.linalg.vector_norm(tensor, math.inf).nan_to_num(1.0, 1.0)
    # Without the bits of its mantissa, a number is the power of two below.
    integer, exponent = EXPONENTS[tensor.dtype]
    return largest.clamp_min(limits.tiny).view(integer).bitwise_and(exponent).view(tensor.dtype)


def whole_range(products: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """A function that is quadratic in rows ``[N, *]``, or linear in each of two such tensors.

    Also where products would leave the range. In float64, or in the rows' precision on the
    processor, where their products are in range.
    """
    if rows[0].device.type == "cpu":
        found = products(*rows)
        # The largest size, for which vector_norm takes ten to twenty times as long.
        largest = max(map(abs, map(float, torch.aminmax(found)))) if found.numel() else 1.0
        if MODERATE**-4 < largest < MODERATE**4:
            return found
    sizes = [scale_of(each) for each in rows]
    found = double(products(*(each / size for each, size in zip(rows, sizes, strict=True))))
    return found * double(sizes[0]) * double(sizes[-1])


def inner(one: Tensor, other: Tensor) -> Tensor:
    """Inner product of two vectors ``[D]``, a scalar tensor, right to a rounding for any D.

    Products in float32 are stored and added up pairwise, which takes twice as long as ``dots``.
    """
    return torch.dot(one, other) if one.dtype == torch.float64 else (one * other).sum()


def dots(rows: Tensor, vector: Tensor) -> Tensor:
    """Inner product of each row with a vector, ``[N, D], [D] -> [N]``, right to some roundings."""
    if _added_up_at_once(rows):
        return rows @ vector
    parts = zip(rows.split(_PRODUCTS, dim=1), vector.split(_PRODUCTS), strict=True)
    return torch.stack([part @ factors for part, factors in parts]).sum(0)


def products_of_pairs(rows: Tensor, others: Tensor | None = None) -> Tensor:
    """Inner products of all pairs of rows ``[N, D]`` and ``[M, D]``, ``[N, M]``.

    Of the same rows, ``[N, N]``, without ``others``. They are right to some roundings.
    """
    others = rows if others is None else others
    if _added_up_at_once(rows):
        return rows @ others.T
    (first, second), *rest = zip(
        rows.split(_PRODUCTS, dim=1), others.split(_PRODUCTS, dim=1), strict=True
    )
    products = first @ second.T
    for one, other in rest:
        products.addmm_(one, other.T)
    return products


def _added_up_at_once(rows: Tensor) -> bool:
    """Whether products of rows ``[N, D]`` can be left to the device's matrix library."""
    few = rows.shape[1] <= _PRODUCTS
    return few or rows.device.type != "cpu" or rows.dtype == torch.float64


def _norms(matrix: Tensor) -> Tensor:
    """Norms of rows whose squares are within the range of the result's precision."""
    device, result = matrix.device.type, torch.promote_types(matrix.dtype, torch.float32)
    if device == "cpu" and not is_small(matrix):
        return squared_row_norms(matrix.to(result)).sqrt_()
    accumulated = result if device == "mps" else torch.float64
    return torch.linalg.vector_norm(matrix, dim=1, dtype=accumulated).to(result)


@cache
def _lowest(dtype: torch.dtype) -> float:
    """The least norm to which squares below the normal range add nothing but rounding."""
    limits = torch.finfo(dtype)
    return math.sqrt(limits.tiny / limits.eps)


def _rescued(matrix: Tensor, norms: Tensor) -> Tensor:
    """Norms of the matrix's rows, where those out of range are computed again from scaled rows."""
    # Times this, squares of the smallest elements are in range; over it, those of the largest.
    factor = 2.0 ** (100 if matrix.dtype == torch.float32 else 700)
    for odd, scale in ((norms < _lowest(matrix.dtype), factor), (norms == torch.inf, 1 / factor)):
        norms = norms.index_put((odd,), _norms(matrix[odd].mul_(scale)) / scale)
    return norms
