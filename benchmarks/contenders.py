"""Who trains in a benchmark: each takes training steps, and tracks something or nothing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradlens
from benchmarks.peers import PEERS, plain
from benchmarks.problems import Problem
from gradlens import quantities
from gradlens.individual.reductions import SquaredNorms
from gradlens.quantities import Quantity, SingleStepQuantity
from gradlens.quantities.bin_adaptation import GradAbsMax
from gradlens.schedules import Schedule, linear
from gradlens.step import Step

COCKPIT_WORKER = Path(__file__).parent / "cockpit_worker.py"
COCKPIT_PYTHON = Path(__file__).parent.parent / ".venv-cockpit" / "bin" / "python"


class SquaredNormsAlone(SingleStepQuantity):
    """What the peers compute too."""

    reductions = (SquaredNorms(),)

    def compute(self, step: Step) -> Any:
        """``[N]``."""
        return step.total(SquaredNorms())


@dataclass(frozen=True)
class Setting:
    """What is trained, and where."""

    problem: Problem
    batch_size: int
    device: torch.device


Contender = Callable[[Setting], Callable[[], float]]
"""Sets itself up; the result takes one training step and returns its seconds."""


def _alone(name: str) -> Callable[[Schedule], list[Quantity]]:
    return lambda schedule: [getattr(quantities, name)(schedule)]


def _adapted(schedule: Schedule) -> list[Quantity]:
    return [quantities.GradHist1d(schedule, adapt=GradAbsMax(schedule))]


SINGLE = (
    "NormTest",
    "InnerTest",
    "OrthoTest",
    "MeanGSNR",
    "GradCovariance",
    "GradNoiseScale",
    "GradHist1d",
    "GradHist2d",
    "Alpha",
    "HessMaxEV",
    "HessTrace",
    "TICDiag",
)
TRACKED: dict[str, Callable[[Schedule], list[Quantity]]] = {
    "squared norms": lambda schedule: [SquaredNormsAlone(schedule)],
    **{name: _alone(name) for name in SINGLE},
    "GradHist1d, adapting": _adapted,
    **{
        name: lambda schedule, name=name: gradlens.configuration(name, schedule)
        for name in ("economy", "business", "full")
    },
}


COUNTED = ("NormTest", "InnerTest", "OrthoTest", "GradHist1d", "MeanGSNR", "GradCovariance")
"""What a growing number of quantities is made of."""


def _first(count: int) -> Callable[[Schedule], list[Quantity]]:
    return lambda schedule: [getattr(quantities, name)(schedule) for name in COUNTED[:count]]


TRACKED |= {f"first {count} quantities": _first(count) for count in range(1, len(COUNTED) + 1)}


def tracked_by_gradlens(name: str, interval: int = 1, budget: float | None = None) -> Contender:
    """A cockpit at every ``interval``-th step, or as often as a ``budget`` allows.

    ``interval`` 0 is for one that never tracks.
    """

    def set_up(setting: Setting) -> Callable[[], float]:
        schedule = linear(interval) if interval else (lambda step: False)
        model = _model(setting)
        loss_function = gradlens.extend(nn.CrossEntropyLoss())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        cockpit = gradlens.Cockpit(model, TRACKED[name](schedule), budget=budget)
        inputs, labels = _batch(setting)
        count = iter(range(10**9))

        def step() -> None:
            optimizer.zero_grad()
            loss = loss_function(model(inputs), labels)
            with cockpit(next(count), loss=loss, optimizer=optimizer):
                loss.backward()
            optimizer.step()

        return _timed(step, setting.device)

    return set_up


def named(name: str) -> Contender:
    """What gradlens tracks, "nothing scheduled", or a peer."""
    if name == "nothing scheduled":
        return tracked_by_gradlens("NormTest", 0)
    return tracked_by_gradlens(name) if name in TRACKED else peer(name)


def peer(name: str) -> Contender:
    """Squared norms by a peer; ``"plain"`` for a step without any."""

    def set_up(setting: Setting) -> Callable[[], float]:
        model = _model(setting)
        backward = {"plain": plain, **PEERS}[name](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs, labels = _batch(setting)

        def step() -> None:
            optimizer.zero_grad()
            backward(inputs, labels)
            optimizer.step()

        return _timed(step, setting.device)

    return set_up


def tracked_by_cockpit(problem_name: str, preset: str) -> Contender:
    """cockpit-for-pytorch 1.0.2, in a process of its own environment."""

    def set_up(setting: Setting) -> Callable[[], float]:
        command = [COCKPIT_PYTHON, COCKPIT_WORKER, problem_name, preset, str(setting.batch_size)]
        worker = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

        def step() -> float:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("step\n")
            worker.stdin.flush()
            return float(worker.stdout.readline())

        return step

    return set_up


def _model(setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    return setting.problem.build().to(setting.device)


def _batch(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    inputs, labels = setting.problem.batch(setting.batch_size)
    return inputs.to(setting.device), labels.to(setting.device)


def _timed(step: Callable[[], None], device: torch.device) -> Callable[[], float]:
    def seconds() -> float:
        _synchronise(device)
        start = time.perf_counter()
        step()
        _synchronise(device)
        return time.perf_counter() - start

    return seconds


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
