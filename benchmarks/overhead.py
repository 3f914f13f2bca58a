"""What tracking costs: steps with gradlens over plain steps, interleaved in one run.

``python -m benchmarks.overhead [PROBLEM ...] [--steps K] [--batch N]``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

import gradlens
from benchmarks.problems import PROBLEMS, Problem
from gradlens import quantities
from gradlens.quantities import Quantity
from gradlens.schedules import linear

WARM_UP = 2
VARIANTS: dict[str, Callable[[], list[Quantity]]] = {
    "nothing scheduled": lambda: [quantities.NormTest(linear(1, offset=10**9))],
    "NormTest": lambda: [quantities.NormTest()],
    "InnerTest": lambda: [quantities.InnerTest()],
    "MeanGSNR": lambda: [quantities.MeanGSNR()],
    "GradCovariance": lambda: [quantities.GradCovariance()],
    "GradHist1d": lambda: [quantities.GradHist1d()],
    "GradHist2d": lambda: [quantities.GradHist2d()],
    "economy": lambda: gradlens.configuration("economy"),
    "business": lambda: gradlens.configuration("business"),
    "full": lambda: gradlens.configuration("full"),
}


class Training:
    """A network with its optimizer, tracked or not, and the seconds of its steps."""

    def __init__(self, problem: Problem, batch_size: int, tracked: list[Quantity] | None) -> None:
        torch.manual_seed(0)
        self.model = problem.build()
        self.inputs, self.labels = problem.batch(batch_size)
        self.loss_function = gradlens.extend(nn.CrossEntropyLoss())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.cockpit = None if tracked is None else gradlens.Cockpit(self.model, tracked)
        self.seconds: list[float] = []

    def step(self) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss_function(self.model(self.inputs), self.labels)
        if self.cockpit is None:
            loss.backward()
        else:
            with self.cockpit(len(self.seconds), loss=loss, optimizer=self.optimizer):
                loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)


def overhead(problem: Problem, variant: str, batch_size: int, steps: int) -> tuple[float, float]:
    """Median seconds of a plain step, and median ratio of a tracked one to its neighbour."""
    plain = Training(problem, batch_size, None)
    tracked = Training(problem, batch_size, VARIANTS[variant]())
    for _ in range(WARM_UP + steps):
        plain.step()
        tracked.step()
    pairs = zip(tracked.seconds[WARM_UP:], plain.seconds[WARM_UP:], strict=True)
    return median(plain.seconds[WARM_UP:]), median(slow / fast for slow, fast in pairs)


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help=", ".join(PROBLEMS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    unknown = set(options.problems) - PROBLEMS.keys()
    if unknown:
        parser.error(
            f"no problem is called {', '.join(unknown)}: choose from {', '.join(PROBLEMS)}"
        )
    for name in options.problems or PROBLEMS:
        print(f"{name}, batch {options.batch}")
        for variant in VARIANTS:
            plain, ratio = overhead(PROBLEMS[name], variant, options.batch, options.steps)
            print(f"  {variant:20} {ratio:8.2f} plain steps of {1e3 * plain:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
