"""Processes that train together, on this machine."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.multiprocessing
from filelock import FileLock
from torch import distributed

Result = TypeVar("Result")

IMPORTED = ["gradlens.cockpit.cockpit", "pytest", "torch._dynamo", "torch.distributed.fsdp"]
"""What takes seconds to import: one process does so, and all others are forked from it."""

multiprocessing.set_forkserver_preload(IMPORTED)


def run_processes(worker: Callable[..., None], processes: int, *arguments: Any) -> None:
    """Call ``worker(rank, *arguments)`` in each of several processes; raise what one raises."""
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        worker, arguments, processes, start_method="forkserver"
    )


def outcomes_of(
    factory: pytest.TempPathFactory,
    worker: Callable[..., None],
    groups: Sequence[int] = (2,),
    names: Iterable[str] = (),
) -> Path:
    """A folder that ``worker(rank, processes, port, folder)`` has filled in groups of processes.

    It has a folder of each of the ``names``. Starting processes takes most of the time: of pytest's
    own processes, the first one that needs the folder makes it for all.
    """
    of_pytest = factory.getbasetemp()
    of_all = of_pytest.parent if "PYTEST_XDIST_WORKER" in os.environ else of_pytest
    folder = of_all / f"{worker.__module__}.{worker.__name__}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = Path(f"{folder}.unfinished")
            for name in ("", *names):
                (unfinished / name).mkdir(exist_ok=True)
            for processes in groups:
                run_processes(worker, processes, processes, free_port(), unfinished)
            unfinished.rename(folder)
    return folder


def join_group(rank: int, processes: int, port: int) -> None:
    """Make this process one of several that exchange tensors on processors."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    distributed.init_process_group("gloo", rank=rank, world_size=processes, timeout=limit)


def in_process_group(work: Callable[[], Result]) -> Result:
    """What ``work`` returns in a group of one process; its models are free when that is destroyed.

    Otherwise, a ``DistributedDataParallel`` model may hold the group's last reference. Freeing it
    waits for gloo's thread while holding the interpreter's lock, which that thread may be waiting
    for, since the last exchange of gradients has to release a Python object.
    """
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        return work()
    finally:
        distributed.destroy_process_group()


def free_port() -> int:
    """A port at which the processes can meet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
