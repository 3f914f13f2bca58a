"""A process group of one process, which ends after the models that use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import distributed

Result = TypeVar("Result")


def in_process_group(work: Callable[[], Result]) -> Result:
    """What ``work`` returns; its models are free by the time the group is destroyed.

    Otherwise, a ``DistributedDataParallel`` model may hold the group's last reference. Freeing it
    waits for gloo's thread while holding the interpreter's lock, which that thread may be waiting
    for, since the last exchange of gradients has to release a Python object.
    """
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        return work()
    finally:
        distributed.destroy_process_group()
