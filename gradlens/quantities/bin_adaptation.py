"""Policies that adapt a histogram's range while training runs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradlens.quantities.step import Step
from gradlens.reductions import AbsMax, Reduction
from gradlens.schedules import EVERY_STEP, Schedule, checked

Range = tuple[float, float]


@dataclass(eq=False)
class BinAdaptation(ABC):
    """From a step to the range of the histograms after it."""

    track_schedule: Schedule = EVERY_STEP
    verbose: bool = False

    reductions: ClassVar[Sequence[Reduction]] = ()

    def __post_init__(self) -> None:
        self.track_schedule = checked(self.track_schedule, type(self).__name__)

    def should_compute(self, global_step: int) -> bool:
        """Whether to adapt the range at this step."""
        return bool(self.track_schedule(global_step))

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        """Reductions of per-sample gradients that adapting at this step takes."""
        return tuple(self.reductions) if self.should_compute(global_step) else ()

    @abstractmethod
    def compute(self, step: Step, range_: Range) -> Range:
        """The range from the next histogram on."""


class NoAdaptation(BinAdaptation):
    """The range stays as it is."""

    def should_compute(self, global_step: int) -> bool:
        return False

    def compute(self, step: Step, range_: Range) -> Range:
        return range_


@dataclass(eq=False)
class _AbsMaxAdaptation(BinAdaptation):
    """±(1 + padding)·max(min_size/2, largest absolute value)."""

    padding: float = 0.0
    min_size: float = 1e-6

    @abstractmethod
    def largest(self, step: Step) -> float:
        """The largest absolute value of what is being binned."""

    def compute(self, step: Step, range_: Range) -> Range:
        largest = self.largest(step)
        if not math.isfinite(largest):
            return range_
        half = (1 + self.padding) * max(self.min_size / 2, largest)
        if half == 0:
            return range_
        if self.verbose:
            print(f"[Step {step.global_step}] {type(self).__name__}: ±{half:g}")
        return (-half, half)


class GradAbsMax(_AbsMaxAdaptation):
    """A range that holds all elements of the per-sample gradients."""

    reductions = (AbsMax(),)

    def largest(self, step: Step) -> float:
        return float(step.total(AbsMax()))


class ParamAbsMax(_AbsMaxAdaptation):
    """A range that holds all elements of the parameters."""

    def largest(self, step: Step) -> float:
        extremes = [parameter.detach().abs().max() for parameter in step.parameters.values()]
        return float(torch.stack([extreme.cpu().double() for extreme in extremes]).max())
