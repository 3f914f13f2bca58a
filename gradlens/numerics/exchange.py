"""Objects that the processes of a training exchange, as ``torch.save`` writes them.

Of what is received, nothing is made but tensors, plain values, and objects of the classes that the
receiver names: what pickle reads may run any code.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from gradlens.history.undefined import Undefined
from gradlens.numerics.tensors import packed

T = TypeVar("T")

PLAIN = (frozenset, Undefined)
"""Plain classes that ``torch.load`` doesn't read of its own accord."""


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
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    with safe_globals([*PLAIN, *classes]):
        others = get_unsafe_globals_in_checkpoint(file)
    if others:
        name = others[0].rpartition(".")[2]
        raise TypeError(f"a {name} can't be sent to other processes")
    return file.getvalue()


def from_bytes(message: bytes, classes: Sequence[type[Any]], device: torch.device) -> Any:
    """What ``to_bytes`` was given, with all tensors on ``device``."""
    with safe_globals([*PLAIN, *classes]):
        return torch.load(io.BytesIO(message), device, weights_only=True)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors the group can exchange: the CPU if possible."""
    pairs = dist.get_backend_config(group).split(",")  # such as "cpu:gloo,cuda:nccl"
    kinds = [pair.partition(":")[0] for pair in pairs]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def _bytes_of(tensor: Tensor) -> bytes:
    return packed(tensor.detach().cpu()).view(torch.uint8).numpy().tobytes()
