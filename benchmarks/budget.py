"""Whether a budget is kept: by how much tracking makes training longer.

``python -m benchmarks.budget [PROBLEM ...] [--share S] [--steps K] [--runs R] [--preset P]``
trains a network within a budget, several times, and prints by how much its steps took more of the
processor's time than steps of the same network without gradlens, which come in between, a few at a
time, and how often each quantity was tracked. The steps in between are no part of the training that
the budget knows of: its clock stands still.
"""

from __future__ import annotations

import argparse
import time
import warnings
from statistics import median

import torch

import gradlens
from benchmarks.contenders import Setting, Training
from benchmarks.problems import PROBLEMS

WARM_UP = 20
TOGETHER = 10
"""Steps of either kind in a row."""


class Clock:
    """Seconds, but for those in between."""

    def __init__(self) -> None:
        self.left_out = 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self.left_out


def share(
    problem: str, budget: float, steps: int, preset: str, device: str
) -> tuple[float, dict[str, int]]:
    """What tracking has taken, and how often each quantity was tracked."""
    setting = Setting(PROBLEMS[problem], PROBLEMS[problem].batch_size, torch.device(device))
    training, clock = Training(setting, gradlens.configuration(preset), budget), Clock()
    assert training.cockpit.budget is not None
    training.cockpit.budget.clock = clock
    for _ in range(WARM_UP):
        training.plain()
    plain, tracked = 0.0, 0.0
    for _ in range(steps // TOGETHER):
        start, begun = time.perf_counter(), time.process_time()
        for _ in range(TOGETHER):
            training.plain()
        clock.left_out += time.perf_counter() - start
        between = time.process_time()
        for _ in range(TOGETHER):
            training()
        plain, tracked = plain + between - begun, tracked + time.process_time() - between
    training.cockpit.close()
    spending = training.cockpit.history.spending
    assert spending is not None
    return tracked / plain - 1, dict(spending.turns)


def main() -> None:
    """Print a line for each problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", default=["MLP", "3c3d"])
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--preset", default="economy")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for problem in options.problems:
        found = [
            share(problem, options.share, options.steps, options.preset, options.device)
            for _ in range(options.runs)
        ]
        each = ", ".join(f"{100 * taken:.1f}" for taken, _ in found)
        taken = median(taken for taken, _ in found)
        print(f"{problem}: {100 * taken:.1f} % of {100 * options.share:g} % ({each})")
        print(f"  {found[-1][1]}")


if __name__ == "__main__":
    main()
