"""Moves the tensors of a value from a device to the host together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Nested = TypeVar("Nested")

JOINED = 2**16
"""Tensors with more elements are moved one by one, since joining them takes their memory again."""


def on_host(value: Nested) -> Nested:
    """The value with its tensors on the host.

    ``value`` is a tensor, or a dict, list, tuple or dataclass of such values; a named tuple becomes
    a tuple. The program waits for the device once for all small tensors of a dtype, instead of once
    for each of them.
    """
    if is_on_host(value):
        return value
    moved: Nested = _filled(value, iter(_moved(_tensors(value))))
    return moved


def is_on_host(value: Any) -> bool:
    """Whether no tensor of a value is on another device."""
    return all(tensor.device.type == "cpu" for tensor in _tensors(value))


def are_small(value: Any) -> bool:
    """Whether no tensor of a value is moved by itself."""
    return all(tensor.numel() <= JOINED for tensor in _tensors(value))


def numbers(values: Sequence[Tensor]) -> list[float]:
    """Scalars as numbers, for which the program waits once for their device."""
    return torch.stack([each.to(values[0].device) for each in values]).tolist() if values else []


def _tensors(value: Any) -> list[Tensor]:
    found, waiting = [], [value]
    while waiting:  # a stack, since a call for each value would take most of the time
        one = waiting.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, Mapping):
            waiting += [*one.values()][::-1]
        elif isinstance(one, (list, tuple)):
            waiting += one[::-1]
        elif is_dataclass(one) and not isinstance(one, type):
            waiting += [getattr(one, field.name) for field in fields(one) if field.init][::-1]
    return found


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The value with other tensors, in the order of ``_tensors``."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: _filled(part, tensors) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_filled(part, tensors) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        filled = {name: _filled(getattr(value, name), tensors) for name in names}
        return replace(cast(Any, value), **filled)
    return value


def _moved(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host, in their order."""
    together: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        small = tensor.layout == torch.strided and tensor.numel() <= JOINED
        key = (tensor.device, tensor.dtype) if small else place
        together.setdefault(key, []).append(place)
    moved: dict[int, Tensor] = {}
    for places in together.values():
        moved |= zip(places, _moved_at_once([tensors[place] for place in places]), strict=True)
    return [moved[place] for place in range(len(tensors))]


def _moved_at_once(tensors: Sequence[Tensor]) -> list[Tensor]:
    if len(tensors) == 1:
        return [tensors[0].cpu()]
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
    parts = joined.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
