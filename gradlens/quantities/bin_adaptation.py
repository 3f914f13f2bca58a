"""Policies that adapt a histogram's range during training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradlens.messages import log
from gradlens.numerics.shards import over_parts, own_part
from gradlens.numerics.tensors import on_host
from gradlens.quantities.step import Step
from gradlens.reductions import AbsMax, Reduction
from gradlens.schedules import EVERY_STEP, Schedule, checked
from gradlens.stateful import State

Range = tuple[float, float]


@dataclass(eq=False)
class BinAdaptation(ABC):
    """Computes from a step the range of the histograms after it.

    It does so at the steps for which ``track_schedule`` is true; ``verbose`` logs the range.
    ``TypeError`` if ``track_schedule`` is neither a number nor callable.
    """

    track_schedule: Schedule | int = EVERY_STEP
    verbose: bool = False

    reductions: ClassVar[Sequence[Reduction]] = ()

    def __post_init__(self) -> None:
        self.schedule = checked(self.track_schedule, type(self).__name__)

    def should_compute(self, global_step: int) -> bool:
        """Whether the range is adapted at this step."""
        return bool(self.schedule(global_step))

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        """Reductions of the per-sample gradients of this step that the policy needs."""
        return tuple(self.reductions) if self.should_compute(global_step) else ()

    @abstractmethod
    def compute(self, step: Step, range_: Range) -> Range:
        """The range of the next histograms, from the present one."""

    def state_dict(self) -> State:
        """What later ranges depend on, besides a step and the range; by default, nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` has returned, if it isn't empty."""
        raise ValueError("the policy saves no state, but there is one")


class NoAdaptation(BinAdaptation):
    """The range doesn't change."""

    def should_compute(self, global_step: int) -> bool:
        return False

    def compute(self, step: Step, range_: Range) -> Range:
        return range_


@dataclass(eq=False)
class _AbsMaxAdaptation(BinAdaptation):
    """±(1 + padding)·max(min_size/2, largest absolute value)."""

    # As in cockpit-for-pytorch.
    padding: float = 0.0
    min_size: float = 1e-6

    @abstractmethod
    def largest(self, step: Step) -> float:
        """The largest absolute value of the elements that the histogram counts."""

    def compute(self, step: Step, range_: Range) -> Range:
        largest = self.largest(step)
        if not math.isfinite(largest):
            return range_
        half = (1 + self.padding) * max(self.min_size / 2, largest)
        if half == 0:
            return range_
        if self.verbose:
            log(f"[Step {step.global_step}] {type(self).__name__}: ±{half:g}")
        return (-half, half)


class GradAbsMax(_AbsMaxAdaptation):
    """±(1 + padding)·max(min_size/2, m); m is the largest absolute value of all gₙⱼ."""

    reductions = (AbsMax(),)

    def largest(self, step: Step) -> float:
        return float(step.total(AbsMax()))


class ParamAbsMax(_AbsMaxAdaptation):
    """±(1 + padding)·max(min_size/2, m); m is the largest absolute value of all parameters."""

    def largest(self, step: Step) -> float:
        parameters = [*step.parameters.values()]
        parts = [own_part(parameter.detach()) for parameter in parameters]
        own = [part.abs().max() if part.numel() else part.new_zeros(()) for part in parts]
        extremes = over_parts(parameters, own, lambda parts: parts.amax(0))
        return float(torch.stack([extreme.double() for extreme in on_host(extremes)]).max())
