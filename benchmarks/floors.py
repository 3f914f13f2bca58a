"""What derivatives cost that curvature can't do without.

``python -m benchmarks.floors [PROBLEM ...]`` prints, for each problem, the CPU time of a draw of a
sampled trace where samples are coupled, which is a backward pass from the outputs, of the graph of
a gradient, and of products with the Hessian and the generalised Gauss-Newton matrix on such a
graph, over that of a plain training step. Each is the least of some alternating runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.contenders import Setting, peer
from benchmarks.problems import PROBLEMS, problem_of
from gradlens.curvature import GGNOperator, HessianOperator

RUNS = 5


def floors(name: str) -> dict[str, float]:
    """CPU time in plain steps."""
    problem = problem_of(name)
    setting = Setting(problem, problem.batch_size, torch.device("cpu"))
    plain = peer("plain")(setting)
    torch.manual_seed(0)
    model = problem.build()
    parameters = dict(model.named_parameters())
    inputs, labels = problem.batch(problem.batch_size)
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, labels)
    ggn, hessian = GGNOperator(loss, outputs, parameters), HessianOperator(loss, parameters)
    direction = torch.randn(hessian.shape[0])
    start = torch.randn_like(outputs)
    hessian.multiply(direction), ggn.multiply(direction)  # which build their graphs
    work: dict[str, Callable[[], object]] = {
        "plain step": plain,
        "draw of a trace": lambda: ggn.pulled_back(start),
        "graph of a gradient": lambda: HessianOperator(loss, parameters),
        "Hessian product": lambda: hessian.multiply(direction),
        "Gauss-Newton product": lambda: ggn.multiply(direction),
    }
    best = dict.fromkeys(work, float("inf"))
    for _ in range(RUNS):
        for what, run in work.items():
            begin = time.process_time()
            run()
            best[what] = min(best[what], time.process_time() - begin)
    unit = best.pop("plain step")
    return {what: seconds / unit for what, seconds in best.items()}


def main() -> None:
    """Print a row for each problem."""
    for name in sys.argv[1:] or PROBLEMS:
        found = ", ".join(f"{what} {ratio:.1f}" for what, ratio in floors(name).items())
        print(f"{name:20} {found}", flush=True)


if __name__ == "__main__":
    main()
