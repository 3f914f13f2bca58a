"""Whether a budget is kept: by how much tracking makes training longer.

``python -m benchmarks.budget [PROBLEM ...] [--share S] [--steps K] [--preset P]`` trains a network
within a budget. It prints by how much its steps took more of the processor's time than steps of the
same network without gradlens, a few at a time in between, and how often each quantity was tracked.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch

import gradlens
from benchmarks.contenders import Setting, Training
from benchmarks.problems import PROBLEMS

WARM_UP = 20
TOGETHER = 10
"""Steps of either kind in a row."""


def main() -> None:
    """Print a line for each problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", default=["MLP", "3c3d"])
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--preset", default="economy")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in options.problems:
        setting = Setting(PROBLEMS[name], PROBLEMS[name].batch_size, torch.device(options.device))
        quantities = gradlens.configuration(options.preset)
        training = Training(setting, quantities, budget=options.share)
        for _ in range(WARM_UP):
            training.plain()
        seconds = [0.0, 0.0]
        for step in range(2 * (options.steps // TOGETHER)):
            is_tracked, start = step % 2, time.process_time()
            for _ in range(TOGETHER):
                (training if is_tracked else training.plain)()
            seconds[is_tracked] += time.process_time() - start
        training.cockpit.close()
        spending = training.cockpit.history.spending
        assert spending is not None
        taken = seconds[1] / seconds[0] - 1
        print(f"{name}: {taken:.1%} of {options.share:.1%}\n  {dict(spending.turns)}", flush=True)


if __name__ == "__main__":
    main()
