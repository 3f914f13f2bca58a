"""Steps whose batch comes in parts: ``python -m benchmarks.parts WHAT COUNT CONTENDER``.

WHAT is "micro-batches" or "processes". It prints seconds of CPU, peak bytes above the start, and
bytes sent, of one step and process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn

from benchmarks.contenders import TRACKED, Setting, Training, Wrap
from benchmarks.memory import status
from benchmarks.problems import PROBLEMS
from gradlens.schedules import linear

PROBLEM = PROBLEMS["3c3d"]
SAMPLES = 64
STEPS = 5


def training(contender: str, parts: int, wrap: Wrap = lambda model: model) -> Callable[[], object]:
    """A function that takes a training step of so many micro-batches of ``SAMPLES`` each."""
    setting = Setting(PROBLEM, parts * SAMPLES, torch.device("cpu"))
    plain = contender == "plain"
    found = Training(setting, [] if plain else TRACKED[contender](linear(1)), parts, wrap)
    return found.plain if plain else found


def measured(step: Callable[[], object]) -> tuple[float, int]:
    """Seconds of CPU of a step, and peak bytes above what was there before."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, seconds = status("VmRSS"), []
    for _ in range(STEPS):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return median(seconds[1:]), status("VmHWM") - before


def worker(rank: int, count: int, port: int, contender: str) -> None:
    """One of several processes."""
    prepare()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=count)
    step, sent = training(contender, 1, nn.parallel.DistributedDataParallel), [0]
    for name in ("send", "broadcast"):
        setattr(distributed, name, counted(getattr(distributed, name), sent))
    seconds, peak = measured(step)
    if rank == count - 1:
        print(seconds, peak, sent[0] // STEPS)
    distributed.destroy_process_group()


def counted(function: Callable[..., Any], sent: list[int]) -> Callable[..., Any]:
    """The function, which adds the bytes of its tensor."""

    def call(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sent[0] += tensor.nbytes
        return function(tensor, *arguments, **options)

    return call


def prepare() -> None:
    """The same start for all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)


@cache
def cost(what: str, count: int, contender: str) -> tuple[float, float, float]:
    """What this module prints in a process of its own, since a process has one peak of memory."""
    command = [sys.executable, "-m", "benchmarks.parts", what, str(count), contender]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak, sent = (float(number) for number in done.stdout.split()[-3:])
    return seconds, peak, sent


def main() -> None:
    """Print the three numbers."""
    what, count, contender = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if what == "processes":
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        multiprocessing.spawn(worker, (count, port, contender), nprocs=count)
        return
    prepare()
    print(*measured(training(contender, count)), 0)


if __name__ == "__main__":
    main()
