"""Processes that train together, on this machine."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

IMPORTED = ["gradlens.cockpit.cockpit", "pytest", "torch._dynamo", "torch.distributed.fsdp"]
"""What takes seconds to import: one process does so, and all others are forked from it."""

multiprocessing.set_forkserver_preload(IMPORTED)


def run_processes(worker: Callable[..., None], processes: int, *arguments: Any) -> None:
    """Call ``worker(rank, *arguments)`` in each of several processes; raise what one raises."""
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        worker, arguments, processes, start_method="forkserver"
    )


def free_port() -> int:
    """A port at which the processes can meet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
