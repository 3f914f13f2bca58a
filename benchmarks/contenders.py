"""Who trains in a benchmark: each takes training steps, and tracks something or nothing."""

from __future__ import annotations

import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradlens
from benchmarks.peers import PEERS, plain
from benchmarks.problems import Problem
from gradlens import quantities
from gradlens.quantities import Quantity, SingleStepQuantity
from gradlens.quantities.bin_adaptation import GradAbsMax
from gradlens.quantities.step import Step
from gradlens.reductions import SquaredNorms
from gradlens.schedules import Schedule, linear
from gradlens.signals import is_normalization

UNDER_COCKPIT = Path(__file__).parent / "under_cockpit.py"
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
    clock: Callable[[], float] = time.perf_counter


Contender = Callable[[Setting], Callable[[], float]]
"""Sets itself up; the result takes one training step and returns its seconds."""


def _alone(name: str, schedule: Schedule, **options: Any) -> list[Quantity]:
    return [getattr(quantities, name)(schedule, **options)]


def _first(count: int, schedule: Schedule) -> list[Quantity]:
    return [getattr(quantities, name)(schedule) for name in COUNTED[:count]]


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
OF_TRAINING = (
    *("Loss", "GradNorm", "ClippedGradNorm", "UpdateSize", "RelativeUpdate", "OptimizerState"),
    *("ActivationOutliers", "OutputEntropy", "AttentionLogits", "AttentionEntropy"),
    *("WeightSpectrum", "UpdateSpectrum", "Stability", "CriticalSharpness", "StepLedger"),
)
"""What people who train large models watch."""
NOISE_SCALES: dict[str, dict[str, Any]] = {
    "GradNoiseScale between parts": {"between": "parts"},
    "GradNoiseScale of norms": {"layers": is_normalization},
    "GradNoiseScale in l1": {"norm": "l1"},
    "GradNoiseScale in the nuclear norm": {"norm": "nuclear"},
}
PARTS = {"GradNoiseScale between parts": 4, "training, 4 parts": 4}
"""In how many micro-batches a batch comes, if there are several."""
COUNTED = ("NormTest", "InnerTest", "OrthoTest", "GradHist1d", "MeanGSNR", "GradCovariance")
"""What a growing number of quantities is made of."""
TRACKED: dict[str, Callable[[Schedule], list[Quantity]]] = {
    "squared norms": lambda schedule: [SquaredNormsAlone(schedule)],
    **{name: partial(_alone, name) for name in (*SINGLE, *OF_TRAINING)},
    "GradHist1d, adapting": lambda s: _alone("GradHist1d", s, adapt=GradAbsMax(s)),
    **{name: partial(_alone, "GradNoiseScale", **each) for name, each in NOISE_SCALES.items()},
    **{
        name: partial(gradlens.configuration, name)
        for name in ("economy", "business", "full", "training")
    },
    "training, 4 parts": partial(gradlens.configuration, "training"),
    **{f"first {n} quantities": partial(_first, n) for n in range(1, len(COUNTED) + 1)},
}


class Paired(ABC):
    """Takes a training step when called, and plain ones to compare it with; gives their seconds.

    Two processes would disturb each other, and two networks lie in different places of memory.
    """

    @abstractmethod
    def __call__(self) -> float:
        """A tracked step."""

    @abstractmethod
    def plain(self) -> float:
        """A plain step of the same process."""


Wrap = Callable[[nn.Module], nn.Module]


class Training(Paired):
    """A network in training under a cockpit."""

    def __init__(
        self,
        setting: Setting,
        quantities: list[Quantity],
        parts: int = 1,
        wrap: Wrap = lambda model: model,
        **options: Any,
    ) -> None:
        self.model = wrap(_model(setting))
        self.loss_function = nn.CrossEntropyLoss()
        self.optimizer = setting.problem.optimizer(self.model.parameters())
        self.cockpit = gradlens.Cockpit(
            self.model, quantities, loss_function=self.loss_function, **options
        )
        self._left_out = 0.0
        if self.cockpit.budget is not None:  # which plain steps are no part of
            self.cockpit.budget.clock = lambda: time.perf_counter() - self._left_out
        inputs, labels = _batch(setting)
        self._parts = [*zip(inputs.chunk(parts), labels.chunk(parts), strict=True)]
        self._count = iter(range(10**9))
        self._tracked = _timed(self._step, setting)
        self._plain = _timed(self._plain_step, setting)

    def __call__(self) -> float:
        return self._tracked()

    def plain(self) -> float:
        """A step of the same network, without gradlens."""
        start = time.perf_counter()
        with _without_hooks(self.model), _without_hooks(self.loss_function):
            seconds = self._plain()
        self._left_out += time.perf_counter() - start
        return seconds

    def _loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss_function(self.model(inputs), labels)
        return loss

    def _mean(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / len(self._parts) if len(self._parts) > 1 else loss

    def _whole_loss(self) -> torch.Tensor:
        return torch.stack([self._loss(*part) for part in self._parts]).mean()

    def _step(self) -> None:
        self.optimizer.zero_grad()
        number, given = next(self._count), {"optimizer": self.optimizer}
        for left, part in zip(reversed(range(len(self._parts))), self._parts, strict=True):
            loss = self._loss(*part)
            passed = {"accumulating": left > 0, "closure": self._whole_loss}
            with self.cockpit(number, loss=loss, **given, **passed):
                self._mean(loss).backward()
        self.optimizer.step()

    def _plain_step(self) -> None:
        self.optimizer.zero_grad()
        for part in self._parts:
            self._mean(self._loss(*part)).backward()
        self.optimizer.step()


IDLE: dict[str, dict[str, Any]] = {
    "nothing scheduled": {},
    "nothing scheduled, without facts": {"facts": False},
    "nothing scheduled, diagnosed": {"diagnose": True},
}
"""Options of cockpits that never track."""


def tracked_by_gradlens(name: str, interval: int = 1, **options: Any) -> Contender:
    """A cockpit with options that tracks at every ``interval``-th step, or one of ``IDLE``."""

    def set_up(setting: Setting) -> Training:
        if name in IDLE:
            return Training(setting, TRACKED["NormTest"](lambda step: False), **IDLE[name])
        return Training(setting, TRACKED[name](linear(interval)), PARTS.get(name, 1), **options)

    return set_up


def named(name: str) -> Contender:
    """What gradlens tracks, one of ``IDLE``, or a peer."""
    return tracked_by_gradlens(name) if name in TRACKED or name in IDLE else peer(name)


def peer(name: str) -> Contender:
    """Squared norms by a peer; ``"plain"`` for a step without any."""

    def set_up(setting: Setting) -> Callable[[], float]:
        model = _model(setting)
        backward = {"plain": plain, **PEERS}[name](model)
        optimizer = setting.problem.optimizer(model.parameters())
        inputs, labels = _batch(setting)

        def step() -> None:
            optimizer.zero_grad()
            backward(inputs, labels)
            optimizer.step()

        return _timed(step, setting)

    return set_up


class CockpitTraining(Paired):
    """cockpit-for-pytorch 1.0.2, in a process of its own environment."""

    def __init__(self, problem_name: str, preset: str, setting: Setting) -> None:
        of = (problem_name, preset, setting.batch_size, setting.device)
        command = [COCKPIT_PYTHON, UNDER_COCKPIT, "steps", *of]
        self._worker = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self) -> float:
        return self._ask("step")

    def plain(self) -> float:
        """A step of another network, without cockpit."""
        return self._ask("plain")

    def _ask(self, what: str) -> float:
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(f"{what}\n")
        self._worker.stdin.flush()
        return float(self._worker.stdout.readline())


def tracked_by_cockpit(problem_name: str, preset: str) -> Contender:
    """Every quantity of a preset at every step."""
    return lambda setting: CockpitTraining(problem_name, preset, setting)


def _model(setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    return setting.problem.build().to(setting.device)


def _batch(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    inputs, labels = setting.problem.batch(setting.batch_size)
    return inputs.to(setting.device), labels.to(setting.device)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    hooks = {module: dict(module._forward_hooks) for module in model.modules()}
    for module in hooks:
        module._forward_hooks.clear()
    try:
        yield
    finally:
        for module, kept in hooks.items():
            module._forward_hooks.update(kept)


def _timed(step: Callable[[], None], setting: Setting) -> Callable[[], float]:
    def seconds() -> float:
        _synchronise(setting.device)
        start = setting.clock()
        step()
        _synchronise(setting.device)
        return setting.clock() - start

    return seconds


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
