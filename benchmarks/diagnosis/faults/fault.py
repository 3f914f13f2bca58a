"""What a fault of the suite is, and what is true of a run that has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from benchmarks.diagnosis.loop import Outcome
from benchmarks.diagnosis.training import Training

Notice: TypeAlias = Literal["never", "harmless", "always"]
"""When a notice is as good as an alarm: never, where the fault does no harm, or always."""


@dataclass(frozen=True)
class Injected:
    """A training with a fault, and the truth about it.

    ``layers`` are the names of modules or parameters that have it, ``step`` is the first at which
    it can be seen, and ``samples`` are indices among those that are trained on; empty or ``None``
    where the fault has no place, or no step that is better than others.
    """

    training: Training
    layers: frozenset[str] = frozenset()
    step: int | None = None
    samples: frozenset[int] = frozenset()
    notice: Notice = "never"


Presence: TypeAlias = Callable[[Outcome, Outcome], bool]
"""Whether a run has the fault, from its outcome and that of the same run without it."""


def certain(faulty: Outcome, healthy: Outcome) -> bool:
    """The fault is there by construction."""
    return True


@dataclass(frozen=True)
class Fault:
    """One way to have the fault of this ``name``, at three ``strengths`` from weak to strong.

    ``apply(training, strength, seed)`` injects it, or is ``None`` where that isn't possible.
    A run in which it isn't ``present`` is left out of the rates.
    """

    name: str
    way: str
    strengths: tuple[float, float, float]
    apply: Callable[[Training, float, int], Injected | None]
    present: Presence = certain


def with_options(training: Training, **options: float | tuple[float, float]) -> Training:
    """The training with other options of its optimizer."""
    return replace(training, options={**training.options, **options})
