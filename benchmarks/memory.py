"""Peak memory of a contender's training steps: ``python -m benchmarks.memory PROBLEM NAME N D``.

``--tensors`` compares what torch allocates on a CPU with plain steps of the same network, in bytes
that are the same in each run: those of the process depend on what the system's allocator keeps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from torch.profiler import profile

from benchmarks.contenders import Paired, Setting, named
from benchmarks.problems import problem_of

STEPS = 3
T = TypeVar("T")


def status(field: str) -> int:
    """Bytes of this process, by the kernel's account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def of_device(set_up: Callable[[], Callable[[], float]]) -> int:
    """What steps take at their peak above what was there before."""
    step = set_up()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(STEPS):
        step()
    return torch.cuda.max_memory_allocated() - before


def peak_of(work: Callable[[], T]) -> tuple[T, int]:
    """What the work gives, and the bytes of the process at its peak above what was there before."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    found = work()
    return found, status("VmHWM") - before


def of_process(set_up: Callable[[], Callable[[], float]]) -> int:
    """The same of this process, by the kernel's account."""
    step = set_up()
    return peak_of(lambda: [step() for _ in range(STEPS)])[1]


def in_a_process(module: str, *arguments: object) -> list[str] | None:
    """What a module prints in another process; ``None`` if a library hasn't what it asks for."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    if "NotImplementedError" in result.stderr:
        return None
    if result.returncode:
        raise RuntimeError(result.stderr)
    return result.stdout.split()


def of_tensors(set_up: Callable[[], Callable[[], float]]) -> int:
    """What torch has allocated at the peak of tracked steps, above that of plain ones before."""
    with profile(profile_memory=True) as first:
        tracked = set_up()
        assert isinstance(tracked, Paired)
        for _ in range(STEPS):
            tracked.plain()
    with profile(profile_memory=True) as then:
        for _ in range(STEPS):
            tracked()
    return _most(then) - _most(first)


def _most(found: profile) -> int:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return max(each["args"]["Total Allocated"] for each in events if each["name"] == "[memory]")


def main() -> None:
    """Print the bytes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problem")
    parser.add_argument("name", help="of a contender, or 'plain'")
    parser.add_argument("batch_size", type=int)
    parser.add_argument("device")
    parser.add_argument("--tensors", action="store_true", help="what torch allocates alone")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    setting = Setting(problem_of(given.problem), given.batch_size, torch.device(given.device))
    measure = of_tensors if given.tensors else of_process
    is_cuda = given.device.startswith("cuda")
    print((of_device if is_cuda else measure)(lambda: named(given.name)(setting)))


if __name__ == "__main__":
    main()
