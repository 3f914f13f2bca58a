"""Objects that the processes of a training exchange, as JSON and the bytes of tensors.

Pickle isn't used, since what it reads may run any code. Of what is received, nothing is made but
tensors, plain values, and objects of the classes that the receiver names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")

LENGTH = 8
"""Bytes of the number in front of a message, which is the length of its JSON."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip


def all_gathered(
    own: T,
    classes: Sequence[type[Any]],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[T]:
    """The objects of all processes of a group, in the order of their ranks.

    Their tensors lie on ``device``. All processes must call this at the same time.
    """
    return merged_over([own], list.__add__, _raised, classes, device, group)


def _raised(error: Exception) -> Any:
    raise error


def merged_over(
    own: T,
    merge: Callable[[T, T], T],
    failed: Callable[[Exception], T],
    classes: Sequence[type[Any]],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> T:
    """The objects of all processes of a group as one, by merging two neighbours' at a time.

    In log₂R rounds of R processes, each of them but the first sends its object once, after those
    that it has received are merged into it; the first one's result is sent to all. No process holds
    more than two objects. ``merge`` must be associative. An exception in it, or of an object that
    can't be sent, becomes an object by ``failed``, so that no process waits in vain. All processes
    must call this at the same time.
    """

    def encoded(value: T) -> bytes:
        try:
            return to_bytes(value, classes)
        except Exception as error:
            return to_bytes(failed(error), classes)

    rank, count = dist.get_rank(group), dist.get_world_size(group)
    step = 1
    while step < count:
        if rank % (2 * step):
            _send(encoded(own), rank - step, group)
            break
        if rank + step < count:
            received = _receive(rank + step, group)
            try:
                own = merge(own, from_bytes(received, classes, device))
            except Exception as error:
                own = failed(error)
        step *= 2
    sent = _broadcast(encoded(own) if rank == 0 else b"", group)
    found: T = from_bytes(sent, classes, device)
    return found


def _send(content: bytes, rank: int, group: dist.ProcessGroup | None) -> None:
    device, to = _device_of(group), _global_rank(rank, group)
    dist.send(torch.tensor([len(content)], device=device), to, group=group)
    dist.send(_as_tensor(content).to(device), to, group=group)


def _receive(rank: int, group: dist.ProcessGroup | None) -> bytes:
    device, sender = _device_of(group), _global_rank(rank, group)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, sender, group=group)
    content = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.recv(content, sender, group=group)
    return _bytes_of(content)


def _broadcast(content: bytes, group: dist.ProcessGroup | None) -> bytes:
    """The content of the first process, in all of them."""
    device, first = _device_of(group), _global_rank(0, group)
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, first, group=group)
    received = torch.empty(0 if content else int(size), dtype=torch.uint8, device=device)
    sent = _as_tensor(content).to(device) if content else received
    dist.broadcast(sent, first, group=group)
    return _bytes_of(sent)


def _global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def to_bytes(value: Any, classes: Sequence[type[Any]]) -> bytes:
    """A message; ``TypeError`` for what is neither plain, nor a tensor, nor of ``classes``."""
    tensors: dict[int, tuple[int, Tensor]] = {}
    plan = json.dumps(_encode(value, {*classes}, tensors)).encode()
    contents = (_bytes_of(tensor) for _, tensor in tensors.values())
    return b"".join([len(plan).to_bytes(LENGTH, "big"), plan, *contents])


def from_bytes(message: bytes, classes: Sequence[type[Any]], device: torch.device) -> Any:
    """What ``to_bytes`` was given, with all tensors on ``device``."""
    start = LENGTH + int.from_bytes(message[:LENGTH], "big")
    plan = json.loads(message[LENGTH:start])
    return _Decoder(message[start:], classes, device).decode(plan)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors the group can exchange: the CPU if possible."""
    pairs = dist.get_backend_config(group).split(",")  # such as "cpu:gloo,cuda:nccl"
    kinds = [pair.partition(":")[0] for pair in pairs]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _encode(value: Any, classes: set[type[Any]], tensors: dict[int, tuple[int, Tensor]]) -> Any:
    """The plan of a value; ``tensors`` gets its tensors, numbered, by their identities."""

    def inner(values: Iterable[Any]) -> list[Any]:
        return [_encode(entry, classes, tensors) for entry in values]

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        # A tensor with several uses is sent once.
        number, _ = tensors.setdefault(id(value), (len(tensors), value))
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [number, dtype, list(value.shape)]}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    for kind in SEQUENCES.values():
        if isinstance(value, kind):
            return {kind.__name__: inner(value)}
    if isinstance(value, Mapping):
        return {"dict": [inner(pair) for pair in value.items()]}
    if type(value) in classes:
        return {"object": [type(value).__name__, inner(vars(value)), inner(vars(value).values())]}
    raise TypeError(f"a {type(value).__name__} can't be sent to other processes")


SEQUENCES: Mapping[str, type[Any]] = {"list": list, "tuple": tuple, "frozenset": frozenset}


class _Decoder:
    """Makes values of the plan of a message and the bytes of its tensors."""

    def __init__(self, content: bytes, classes: Sequence[type[Any]], device: torch.device) -> None:
        self._content = bytearray(content)
        self._classes = {each.__name__: each for each in classes}
        self._device = device
        self._tensors: list[Tensor] = []
        self._start = 0

    def decode(self, plan: Any) -> Any:
        """The value that a part of the plan describes."""
        if not isinstance(plan, dict):
            return plan
        ((kind, found),) = plan.items()
        if kind == "tensor":
            return self._tensor(*found)
        if kind == "size":
            return torch.Size(found)
        if kind == "dtype":
            return DTYPES[found]
        if kind == "device":
            return self._device
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in found}
        if kind == "object":
            return self._instance(*found)
        return SEQUENCES[kind](map(self.decode, found))

    def _tensor(self, number: int, dtype: str, shape: list[int]) -> Tensor:
        if number == len(self._tensors):
            self._tensors.append(self._next_tensor(DTYPES[dtype], shape))
        return self._tensors[number]

    def _next_tensor(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        count, start = math.prod(shape), self._start
        if not count:
            return torch.empty(shape, dtype=dtype, device=self._device)
        self._start += count * dtype.itemsize
        part = self._content[start : self._start]  # a copy, whose memory is aligned
        return torch.frombuffer(part, dtype=dtype).reshape(shape).to(self._device)

    def _instance(self, name: str, names: list[str], values: list[Any]) -> Any:
        found = object.__new__(self._classes[name])
        vars(found).update(zip(names, map(self.decode, values), strict=True))
        return found
