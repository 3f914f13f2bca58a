"""Whether a budget is kept: the share of the training time that tracking takes.

``python -m benchmarks.budget [PROBLEM ...] [--share S] [--steps K] [--preset P] [--device D]``
trains a network within a budget, and another copy of it before and after, and prints by how much
the steps took longer. In between would not do: a step lasts from one context to the next.
"""

from __future__ import annotations

import argparse
import warnings

import torch

from benchmarks.contenders import Setting, peer, tracked_by_gradlens
from benchmarks.problems import PROBLEMS

WARM_UP = 10


def share(problem: str, budget: float, steps: int, preset: str, device: str) -> float:
    """What tracking has taken, after a few steps of either kind."""
    setting = Setting(PROBLEMS[problem], PROBLEMS[problem].batch_size, torch.device(device))
    plain = peer("plain")(setting)
    tracked = tracked_by_gradlens(preset, budget=budget)(setting)
    half = steps // 2
    untracked = [plain() for _ in range(WARM_UP + half)][WARM_UP:]
    whole = [tracked() for _ in range(WARM_UP + steps)][WARM_UP:]
    untracked += [plain() for _ in range(steps - half)]
    return 1 - sum(untracked) / sum(whole)


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
    for problem in options.problems:
        found = share(problem, options.share, options.steps, options.preset, options.device)
        print(f"{problem}: {100 * found:.2f} % of {100 * options.share:g} %", flush=True)


if __name__ == "__main__":
    main()
