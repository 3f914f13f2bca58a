"""Moves the tensors of a value from a device to the host together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any, TypeVar

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
    found = [*_tensors(value)]
    if all(tensor.device.type == "cpu" for tensor in found):
        return value
    moved: Nested = _filled(value, iter(_moved(found)))
    return moved


def numbers(values: Sequence[Tensor]) -> list[float]:
    """Scalars as numbers, for which the program waits once for their device."""
    return torch.stack([each.to(values[0].device) for each in values]).tolist() if values else []


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, (float, int, str)):
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_tensors, value))
    elif _is_dataclass(value):
        yield from _tensors(_arguments(value))


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The value with other tensors, in the order of ``_tensors``."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: _filled(part, tensors) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_filled(part, tensors) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if _is_dataclass(value):
        return replace(value, **_filled(_arguments(value), tensors))
    return value


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _arguments(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that its constructor takes."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


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
