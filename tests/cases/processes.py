"""Processes that train together, on this machine."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.multiprocessing
from torch import distributed

IMPORTED = ["gradlens.cockpit.cockpit", "pytest", "torch._dynamo", "torch.distributed.fsdp"]
"""What takes seconds to import: one process does so, and all others are forked from it."""

multiprocessing.set_forkserver_preload(IMPORTED)


def run_processes(worker: Callable[..., None], processes: int, *arguments: Any) -> None:
    """Call ``worker(rank, *arguments)`` in each of several processes; raise what one raises."""
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        worker, arguments, processes, start_method="forkserver"
    )


def join_group(rank: int, processes: int, port: int) -> None:
    """Make this process one of several that exchange tensors on processors."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    distributed.init_process_group("gloo", rank=rank, world_size=processes, timeout=limit)


def free_port() -> int:
    """A port at which the processes can meet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
