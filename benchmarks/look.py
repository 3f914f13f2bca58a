"""What a look at whose rows are whose costs: ``python -m benchmarks.look [PROBLEM ...]``.

Prints, for each problem, the time of a look over that of a plain training step (the median of
alternating runs), and the memory that a step with a look takes at its peak beyond a plain step.
``python -m benchmarks.look --peak PROBLEM plain|look`` prints the peak of one process alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.memory import status
from benchmarks.problems import NAMED, PROBLEMS, Problem
from gradlens.gradients.gradients import Gradients, Setting
from gradlens.graph.model_calls import keep_calls

STEPS = 7


class Switch(nn.Module):
    """A mixture of experts, each of which gets the rows that a gate sends to it."""

    def __init__(self, width: int = 256, experts: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T]``."""
        tokens = self.embed(x).flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weights[rows, None])
        logits: Tensor = self.head((tokens + mixed).unflatten(0, x.shape).mean(1))
        return logits


ALL = {**PROBLEMS, **NAMED, "switch": Problem(Switch, (64,), batch_size=16, words=1000)}


class Run:
    """A network in training, with plain steps and looks at them."""

    def __init__(self, problem: Problem) -> None:
        torch.manual_seed(0)
        self.model = problem.build()
        self.inputs, self.labels = problem.batch(problem.batch_size)
        self.optimizer = problem.optimizer(self.model.parameters())
        keep_calls(self.model, self)

    def step(self, look: bool) -> float:
        """One training step; the seconds of the look, or of the step without one."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        seconds = self._look(loss) if look else 0.0
        loss.backward()
        self.optimizer.step()
        return seconds or time.perf_counter() - start

    def _look(self, loss: Tensor) -> float:
        start = time.perf_counter()
        gradients = Gradients(Setting(dict(self.model.named_parameters()), self.model), {})
        gradients.begin(loss)
        gradients.release()
        return time.perf_counter() - start


def price(name: str) -> tuple[float, float]:
    """A look's time in plain steps, and its MB above them."""
    run = Run(ALL[name])
    run.step(True)
    pairs = [(run.step(False), run.step(True)) for _ in range(STEPS)]
    peaks = [_peak_of_process(name, kind) for kind in ("plain", "look")]
    return median(look / plain for plain, look in pairs), (peaks[1] - peaks[0]) / 2**20


def _peak_of_process(name: str, kind: str) -> int:
    command = [sys.executable, "-m", "benchmarks.look", "--peak", name, kind]
    runs: list[Callable[[], str]] = [partial(subprocess.check_output, command, text=True)] * 3
    return int(median(int(run()) for run in runs))


def peak(name: str, look: bool) -> int:
    """Bytes that steps take at their peak above what was there before."""
    run = Run(ALL[name])
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    for _ in range(3):
        run.step(look)
    return status("VmHWM") - before


def main() -> None:
    """Print a row for each problem."""
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--peak"]:
        print(peak(sys.argv[2], sys.argv[3] == "look"))
        return
    for name in sys.argv[1:] or [each for each in ALL if each not in NAMED]:
        steps, megabytes = price(name)
        print(f"{name:20} {steps:5.2f} plain steps, {megabytes:5.0f} MB", flush=True)


if __name__ == "__main__":
    main()
