"""Long runs: memory of a training over its steps, and what it takes to read and draw a run's file.

``python -m benchmarks.long_runs memory`` trains, ``python -m benchmarks.long_runs read`` reads.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.memory import status
from gradlens.cockpit.aggregation import Aggregation
from gradlens.cockpit.cockpit import Cockpit
from gradlens.cockpit.run import Run
from gradlens.quantities import GradNorm, Loss, Quantity
from gradlens.quantities.presets import configuration

SHOWN = (1_000, 10_000, 50_000, 100_000)
"""Steps after which the memory of a training is printed."""

REAL = 8
"""Steps of a real training whose records are repeated, with other numbers."""


@dataclass(frozen=True)
class Kind:
    """A network, and what is tracked at each step."""

    model: Callable[[], nn.Module]
    inputs: int
    quantities: Callable[[], list[Quantity]]


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
                         nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))  # fmt: skip


def _deep() -> nn.Module:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(200)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)  # so that gradients reach the first layer
    return nn.Sequential(*layers)


KINDS = {
    "economy": Kind(lambda: nn.Linear(20, 5), 20, lambda: configuration("economy")),
    "full": Kind(_perceptron, 20, lambda: configuration("full")),
    "layers": Kind(_deep, 4, lambda: [Loss(), GradNorm()]),
}
"""Logistic regression; a network of eight parameters; and one of 200 layers."""


def train(kind: Kind, steps: int, path: Path | None, after: Callable[[int], None]) -> Cockpit:
    """A real training, with ``after`` called with the number of steps that are done."""
    torch.manual_seed(0)
    model, loss_function = kind.model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cockpit = Cockpit(model, kind.quantities(), loss_function=loss_function, run=path)
    for step in range(steps):
        optimizer.zero_grad()
        batch, labels = torch.randn(32, kind.inputs), torch.randint(4, (32,))
        loss = loss_function(model(batch), labels)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
        after(step + 1)
    return cockpit


def write(kind: Kind, steps: int, path: Path) -> None:
    """A run's file with the records of a short training again and again, times random numbers."""
    warnings.simplefilter("ignore")
    real = train(kind, REAL, None, lambda _: None)
    found = real.get_output()
    quantities = kind.quantities()
    run = Run(Aggregation(quantities), real.parameters, path, False, True)
    generator = np.random.default_rng(0)
    for step in range(steps):
        record = found[1 + step % (REAL - 2)]
        values = {name: _jittered(record[name], generator) for name in record}
        run.record(step, values | ({"Time": 0.01 * step} if "Time" in values else {}))
    run.close()


def _jittered(value: Any, generator: np.random.Generator) -> Any:
    if type(value) is float:
        return value * float(generator.lognormal(0, 0.1))
    if type(value) is dict:
        if {*map(type, value.values())} == {float}:
            factors = generator.lognormal(0, 0.1, len(value)).tolist()
            return {k: v * f for (k, v), f in zip(value.items(), factors, strict=True)}
        return {key: _jittered(part, generator) for key, part in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind == "i":  # counts of a histogram
        return generator.poisson(value).astype(value.dtype)
    return value


MEASURED = """
import sys, time, warnings
from pathlib import Path
import matplotlib.figure
import gradlens.cli.commands
from gradlens.cli.main import main
from benchmarks.memory import status
before = time.process_time(), status("VmRSS")
{work}
print(time.process_time() - before[0], status("VmHWM") / 2**20)
"""

WORKS = {
    "load": "from gradlens import load_run; load_run({path!r})",
    "summary": "main(['summary', {path!r}])",
    "plot": "main(['plot', {path!r}, '-o', {path!r} + '.png'])",
    "layers": "main(['plot', {path!r}, '--layers', '-o', {path!r} + '.layers.png'])",
}


def measured(work: str, path: Path) -> str:
    """CPU seconds besides imports, and the peak of memory, in a process of its own."""
    code = MEASURED.format(work=WORKS[work].format(path=str(path)))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if result.returncode:
        return result.stderr.strip().splitlines()[-1]
    seconds, megabytes = result.stdout.strip().splitlines()[-1].split()
    return f"{float(seconds):6.1f} s CPU {float(megabytes):8.0f} MB at the peak"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    memory = commands.add_parser("memory")
    memory.add_argument("--steps", type=int, default=SHOWN[-1])
    memory.add_argument("--kind", choices=KINDS, default="economy")
    read = commands.add_parser("read")
    read.add_argument("--steps", type=int, default=10_000)
    read.add_argument("--kind", choices=KINDS, default="full")
    read.add_argument("--keep", type=Path, help="file of the run, which is written if it's missing")
    options = parser.parse_args()
    kind = KINDS[options.kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        if options.command == "memory":

            def show(step: int) -> None:
                if step in SHOWN:
                    print(f"{step:8,} steps: {status('VmRSS') / 2**20:6.0f} MB", flush=True)

            train(kind, options.steps, path, show)
            return
        path = options.keep or path
        if not path.exists():
            start = time.process_time()
            write(kind, options.steps, path)
            print(f"written in {time.process_time() - start:.1f} s")
        print(f"{options.kind}, {options.steps:,} steps, {path.stat().st_size / 2**20:.0f} MB")
        for work in WORKS:
            print(f"{work:8} {measured(work, path)}", flush=True)


if __name__ == "__main__":
    main()
