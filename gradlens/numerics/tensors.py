"""Tensors in the precision that sums take, and on the host or a device.

A program waits for a device as seldom as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor

Nested = TypeVar("Nested")
Value = TypeVar("Value")
Result = TypeVar("Result")

SMALL = 2**17
"""Elements of a tensor that is converted to float64 for sums of squares and products.

Measured on two cores: with so few, calls take most of the time, and float64 needs fewer of them,
since squares of float32 don't leave its range.
"""


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor is small, and its squares are within the range of float64."""
    narrower = tensor.dtype.itemsize < torch.float64.itemsize
    return narrower and tensor.numel() <= SMALL and tensor.device.type != "mps"


def double(tensor: Tensor) -> Tensor:
    """In float64 where the device has it, in float32 elsewhere."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def widest(device: torch.device) -> torch.dtype:
    """The precision of ``double``."""
    return torch.float32 if device.type == "mps" else torch.float64


def accumulable(tensor: Tensor) -> Tensor:
    """Detached, and in float32 where sums in the tensor's own precision would lose digits."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


# Between the host and a device ------------------------------------------------------------------

JOINED = 2**16
"""Tensors with more elements are moved one by one, since joining them takes their memory again."""


def on_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the host on a device; the program doesn't wait for a CUDA device."""
    # From memory that isn't pinned, CUDA has read everything when the call returns.
    return tensor.to(device, dtype, non_blocking=device.type == "cuda")


def on_host(value: Nested) -> Nested:
    """The value with its tensors on the host.

    ``value`` is a tensor, or a dict, list, tuple or dataclass of such values; a named tuple becomes
    a tuple. The program waits for the device once for all small tensors of a dtype, instead of once
    for each of them.
    """
    tensors = _tensors(value)
    if all(each.device.type == "cpu" for each in tensors):
        return value
    moved: Nested = _filled(value, iter(_moved(tensors)))
    return moved


def packed(tensor: Tensor) -> Tensor:
    """Its elements ``[E]``, next to each other in memory, so that it can be viewed as bytes.

    ``flatten`` keeps the stride of a vector, and ``contiguous`` that of a single element.
    """
    flat = tensor.flatten()
    return flat if flat.stride(0) == 1 else flat.contiguous().as_strided(flat.shape, (1,))


def is_on_host(value: Any) -> bool:
    """Whether no tensor of a value is on another device."""
    return all(tensor.device.type == "cpu" for tensor in _tensors(value))


def are_small(value: Any) -> bool:
    """Whether no tensor of a value is moved by itself."""
    return all(tensor.numel() <= JOINED for tensor in _tensors(value))


def together(values: Mapping[str, Tensor]) -> tuple[tuple[str, ...], Tensor]:
    """Names, and their scalars in one tensor ``[P]``, which is moved faster than each of them."""
    devices = [each.device for each in values.values()]
    scalars = [each.to(devices[0]) for each in values.values()]
    return (*values,), torch.stack(scalars) if scalars else torch.zeros(0, device="cpu")


PLAIN = frozenset({float, int, bool, str, NoneType})
"""Types of values without tensors, which are passed over first, since most values have them."""


@cache
def _parts_of(kind: Hashable) -> tuple[str, ...] | None:
    """Names of what a dataclass is made of; ``None`` for other types."""
    if isinstance(kind, type) and is_dataclass(kind):
        return tuple(field.name for field in fields(kind) if field.init)
    return None


def _tensors(value: Any) -> list[Tensor]:
    found, waiting = [], [value]
    while waiting:  # a stack, since a call for each value would take most of the time
        one = waiting.pop()
        kind: Any = type(one)
        if kind in PLAIN:
            continue
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            waiting += one[::-1]
        elif parts := _parts_of(kind):
            waiting += [getattr(one, name) for name in parts][::-1]
        elif isinstance(one, Mapping):
            waiting += [*one.values()][::-1]
    return found


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The value with other tensors, in the order of ``_tensors``."""
    kind: Any = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        filled = [_filled(part, tensors) for part in value]
        return tuple(filled) if isinstance(value, tuple) else filled
    if parts := _parts_of(kind):
        return replace(value, **{name: _filled(getattr(value, name), tensors) for name in parts})
    if isinstance(value, Mapping):
        return {key: _filled(part, tensors) for key, part in value.items()}
    return value


def _moved(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host, in their order."""
    small = [each.layout == torch.strided and each.numel() <= JOINED for each in tensors]
    keys = [each.device if one else None for each, one in zip(tensors, small, strict=True)]
    return in_groups(tensors, keys, _moved_at_once)


def _moved_at_once(tensors: Sequence[Tensor]) -> Iterable[Tensor]:
    """By one copy of their bytes, whatever their dtypes."""
    if len(tensors) == 1:
        return [tensors[0].cpu()]
    # The largest dtypes first, so that each number begins at a multiple of its own size.
    order = sorted(range(len(tensors)), key=lambda place: -tensors[place].dtype.itemsize)
    content = [packed(tensors[place]).view(torch.uint8) for place in order]
    parts = torch.cat(content).cpu().split([len(each) for each in content])
    moved = {
        place: part.view(tensors[place].dtype).view(tensors[place].shape)
        for place, part in zip(order, parts, strict=True)
    }
    return [moved[place] for place in range(len(tensors))]


def in_groups(
    values: Sequence[Value],
    keys: Iterable[Hashable | None],
    compute: Callable[[list[Value]], Iterable[Result]],
) -> list[Result]:
    """The values' results in their order; ``compute`` gets those with the same key.

    A value whose key is ``None`` is computed alone.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault((place,) if key is None else key, []).append(place)
    found: dict[int, Result] = {}
    for places in groups.values():
        found |= zip(places, compute([values[place] for place in places]), strict=True)
    return [found[place] for place in range(len(values))]
