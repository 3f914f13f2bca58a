"""Peak memory of a contender's training steps: ``python -m benchmarks.memory PROBLEM NAME N D``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from benchmarks.contenders import Setting, named
from benchmarks.problems import problem_of

STEPS = 3


def status(field: str) -> int:
    """Bytes of this process, by the kernel's account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def main() -> None:
    """Print the bytes that steps take at their peak above what was there before."""
    problem, name, batch_size, device = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    warnings.simplefilter("ignore")
    setting = Setting(problem_of(problem), batch_size, torch.device(device))
    step = named(name)(setting)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(STEPS):
            step()
        print(torch.cuda.max_memory_allocated() - before)
        return
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    for _ in range(STEPS):
        step()
    print(status("VmHWM") - before)


if __name__ == "__main__":
    main()
