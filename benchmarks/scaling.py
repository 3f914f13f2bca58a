"""How the cost of tracking grows with the batch, the network, and the number of quantities.

``python -m benchmarks.scaling [WHAT ...] [--steps K] [--device D] [--write]`` prints ratios of
tracked steps to the plain steps beside them and the peak memory above theirs, for the batch size
(of 3c3d), the width and depth of an MLP, the sequence length of a transformer, the number of
quantities, and the numbers of micro-batches and processes (on 3c3d, with 64 samples each). Those of
the latter two are ratios of CPU time, each from a process of its own, since a process has one peak
of memory. ``--write`` puts it into docs/scaling.csv.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn

from benchmarks.contenders import COUNTED, TRACKED, Setting, Training, Wrap, tracked_by_gradlens
from benchmarks.memory import in_a_process, peak_of
from benchmarks.overhead import megabytes_above_plain, merge, ratios
from benchmarks.problems import PROBLEMS, SCALED, problem_of
from gradlens.schedules import linear

QUANTITIES = "number of quantities"
PARTS = {"micro-batches": (1, 4, 16), "processes": (1, 2, 4)}
CONTENDERS = ("squared norms", "economy")


def cases(what: str) -> Iterator[tuple[int, str, str]]:
    """Size, problem and contender."""
    if what == QUANTITIES:
        for count in range(1, len(COUNTED) + 1):
            yield count, "3c3d", f"first {count} quantities"
        return
    for size in PARTS.get(what) or SCALED[what]:
        for contender in CONTENDERS:
            yield size, f"{what} {size}", contender


def main() -> None:
    """Print a table of ratios, or what a process of it finds."""
    if sys.argv[1:2] == ["parts"]:
        print_parts(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    known = (*SCALED, QUANTITIES, *PARTS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(known))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="write docs/scaling.csv")
    options = parser.parse_args()
    unknown = set(options.what) - set(known)
    if unknown:
        parser.error(f"{', '.join(unknown)} doesn't grow: choose of {', '.join(known)}")
    warnings.simplefilter("ignore")
    order = [first_cells(what, size, name) for what in known for size, _, name in cases(what)]
    for what in options.what or known:
        print(what)
        rows = []
        for size, problem, contender in cases(what):
            rows.append(measured(what, size, problem, contender, options.steps, options.device))
            print("  {:>6} {:22} {:>8} {:>6} MB".format(*rows[-1][1:]), flush=True)
        if options.write:
            merge("scaling.csv", COLUMNS, rows, order)


COLUMNS = ("what", "size", "contender", "ratio", "MB")


def measured(
    what: str, size: int, problem: str, contender: str, steps: int, device: str
) -> list[str]:
    """A row of the table."""
    if what in PARTS:
        return measured_parts(what, size, contender)
    n = problem_of(problem).batch_size
    setting = Setting(problem_of(problem), n, torch.device(device))
    _, found = ratios(tracked_by_gradlens(contender), setting, steps, together=1)
    megabytes = megabytes_above_plain(problem, contender, n, device, processes=1)
    return [*first_cells(what, size, contender), f"{median(found):.2f}", f"{megabytes:.0f}"]


def measured_parts(what: str, count: int, contender: str) -> list[str]:
    """A row of the table, for a batch in parts."""
    (seconds, peak, sent), plain = (cost(what, count, n) for n in (contender, "plain"))
    if what == "processes":
        print(f"  {sent / 1e6:.1f} MB sent or passed on by each process at a step")
    megabytes = (peak - plain[1]) / 1e6
    return [*first_cells(what, count, contender), f"{seconds / plain[0]:.2f}", f"{megabytes:.0f}"]


def first_cells(what: str, size: int, contender: str) -> tuple[str, str, str]:
    """Those that tell rows apart."""
    return what, str(size), "quantities" if what == QUANTITIES else contender


# Steps whose batch comes in parts.

SAMPLES, STEPS = 64, 5


def training(contender: str, parts: int, wrap: Wrap = lambda model: model) -> Callable[[], object]:
    """A function that takes a training step of so many micro-batches of ``SAMPLES`` each."""
    setting = Setting(PROBLEMS["3c3d"], parts * SAMPLES, torch.device("cpu"))
    plain = contender == "plain"
    found = Training(setting, [] if plain else TRACKED[contender](linear(1)), parts, wrap)
    return found.plain if plain else found


def seconds_and_peak(step: Callable[[], object]) -> tuple[float, int]:
    """Seconds of CPU of a step, and peak bytes above what was there before."""

    def seconds() -> float:
        start = time.process_time()
        step()
        return time.process_time() - start

    found, peak = peak_of(lambda: [seconds() for _ in range(STEPS)])
    return median(found[1:]), peak


def worker(rank: int, count: int, port: int, contender: str) -> None:
    """One of several processes."""
    prepare()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=count)
    step, sent = training(contender, 1, nn.parallel.DistributedDataParallel), [0]
    for name in ("send", "broadcast"):
        setattr(distributed, name, counted(getattr(distributed, name), sent))
    seconds, peak = seconds_and_peak(step)
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
    """What ``print_parts`` prints in a process of its own."""
    found = in_a_process("benchmarks.scaling", "parts", what, count, contender) or []
    seconds, peak, sent = map(float, found[-3:])
    return seconds, peak, sent


def print_parts(what: str, count: int, contender: str) -> None:
    """Seconds of CPU, peak bytes above the start, and bytes sent, of one step and process."""
    if what == "processes":
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        multiprocessing.spawn(worker, (count, port, contender), nprocs=count)
        return
    prepare()
    print(*seconds_and_peak(training(contender, count)), 0)


if __name__ == "__main__":
    main()
