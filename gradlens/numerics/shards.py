"""Tensors of which each process has a part: those that torch calls ``DTensor``.

Values of such tensors are computed from the parts, and only these values are exchanged. All
processes must call these functions for the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from gradlens.numerics.tensors import in_groups
from gradlens.numerics.unavailable import UnavailableError


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether each process has a part of the tensor, or a copy that is known to be one."""
    return isinstance(tensor, DTensor)


def any_distributed(tensors: Iterable[Tensor]) -> bool:
    """Whether one of the tensors is distributed."""
    return bool([tensor for tensor in tensors if isinstance(tensor, DTensor)])


def processes_of(tensors: Iterable[Tensor]) -> int:
    """The largest number of processes that one of the tensors is distributed among."""
    return max(
        (each.device_mesh.size() for each in tensors if isinstance(each, DTensor)), default=1
    )


def own_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has: all of it, unless the tensor is distributed."""
    return _summed(tensor).to_local() if is_distributed(tensor) else tensor


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """``own_part`` of each tensor."""
    return [_summed(t).to_local() if isinstance(t, DTensor) else t for t in tensors]


def has_whole_rows(tensor: Tensor) -> bool:
    """Whether each entry along the first axis is in one process, with all that belongs to it."""
    if not isinstance(tensor, DTensor):
        return True
    axes = _divided_axes(tensor)
    return all(_summed(tensor).placements[axis].is_shard(0) for axis in axes)


def has_nonzero(tensor: Tensor) -> bool:
    """Whether this process's part of a tensor has a number other than zero."""
    own = own_part(tensor)
    return bool((own.coalesce().values() if own.is_sparse else own).any())


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, from the parts of all processes.

    ``UnavailableError`` for one whose memory is freed, such as a parameter that was put together
    for a layer alone.
    """
    if is_distributed(tensor):
        return tensor.full_tensor()
    if tensor.numel() and not tensor.untyped_storage().size():
        raise UnavailableError(FREED)
    return tensor


FREED = (
    "it needs the parameters, which fully_shard gathers for their layers alone and had freed "
    "before the per-sample gradients were complete"
)


def over_parts(
    tensors: Sequence[Tensor], values: Sequence[Tensor], joined: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Values of tensors, from those of this process's parts, which have the same shape ``[*S]``.

    ``joined`` makes the values of K tensors ``[K, *S]`` of those of their R parts ``[R, K, *S]``,
    in float64. Values of all tensors that are divided in the same way are exchanged together.
    """

    def exchanged(parts: list[tuple[Tensor, Tensor]]) -> Iterable[Tensor]:
        tensor = parts[0][0]
        if not isinstance(tensor, DTensor):
            return [value for _, value in parts]
        together = torch.stack([value.double() for _, value in parts])
        mesh = tensor.device_mesh
        for axis in _divided_axes(tensor):
            received = [torch.empty_like(together) for _ in range(mesh.size(axis))]
            dist.all_gather(received, together, group=mesh.get_group(axis))
            together = joined(torch.stack(received))
        return [found.to(value.dtype) for found, (_, value) in zip(together, parts, strict=True)]

    layouts = [
        (each.device_mesh, _divided_axes(each)) if isinstance(each, DTensor) else None
        for each in tensors
    ]
    if not any(layouts):
        return list(values)
    return in_groups([*zip(tensors, values, strict=True)], layouts, exchanged)


def _divided_axes(tensor: DTensor) -> tuple[int, ...]:
    """The axes of the mesh along which processes have different parts."""
    placements = _summed(tensor).placements
    return tuple(axis for axis, each in enumerate(placements) if not each.is_replicate())


def _summed(tensor: DTensor) -> DTensor:
    """The tensor without axes along which the processes' tensors are still to be added up."""
    if not any(each.is_partial() for each in tensor.placements):
        return tensor
    return tensor.redistribute(
        placements=[Replicate() if each.is_partial() else each for each in tensor.placements]
    )
