"""What a fault of the suite is, and what is true of a run that has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
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


# Whether a run has a fault that does harm, from its losses and those of the same run without it.
# The rules of the diagnosis have no part in it: validation losses are compared.


WORSE = 0.05
"""A run is worse if it lacks more than this share of what the healthy one takes off the loss."""
STALLED = 0.2
"""A run that is stuck takes off less than this share of what the healthy one takes off."""
BLOWN_UP = 5.0
"""A loss of so many times its start isn't noise: healthy runs of all problems stay below 2.5."""
RISEN = 0.1
"""A validation loss rises if it ends this share above its minimum."""
CLEAR = 0.5
"""Validation loss over its start, of data whose labels depend on the inputs above all."""
JUMPED = 2.0
"""A loss of so many times the largest of the steps before is a jump."""
ROW = 5
"""Steps in a row that a rise takes, so that it isn't one batch."""
BEFORE = 10
"""Steps before one with a jump."""


def gained(outcome: Outcome, healthy: Outcome) -> float:
    """The validation loss that was taken off, over that of the healthy run."""
    taken = healthy.valid_start - healthy.valid_end
    return (healthy.valid_start - outcome.valid_end) / taken


def hurts(faulty: Outcome, healthy: Outcome) -> bool:
    """Less is learnt."""
    return gained(faulty, healthy) < 1 - WORSE


def stalls(faulty: Outcome, healthy: Outcome) -> bool:
    """Next to nothing is learnt."""
    return gained(faulty, healthy) < STALLED


def diverges(faulty: Outcome, healthy: Outcome) -> bool:
    """The loss blows up, or ends above its start."""
    return faulty.peak > BLOWN_UP * healthy.start or not faulty.end < healthy.start


def rises(faulty: Outcome, healthy: Outcome) -> bool:
    """The loss of some steps in a row is on average above its start, after the first of these."""
    losses = faulty.losses[ROW:]
    return any(fmean(losses[n : n + ROW]) > healthy.start for n in range(len(losses) - ROW + 1))


def swings(faulty: Outcome, healthy: Outcome) -> bool:
    """The loss rises or next to nothing is learnt, without divergence."""
    does_harm = rises(faulty, healthy) or stalls(faulty, healthy)
    return does_harm and hurts(faulty, healthy) and not diverges(faulty, healthy)


def overfits(faulty: Outcome, healthy: Outcome) -> bool:
    """What is learnt is lost again: the validation loss rises far above the training loss."""
    lost = faulty.valid_end - faulty.valid_least
    risen = lost > RISEN * faulty.valid_least
    does_harm = lost > WORSE * (healthy.valid_start - healthy.valid_end)
    return risen and does_harm and faulty.end < 0.5 * faulty.valid_end


def can_contradict(faulty: Outcome, healthy: Outcome) -> bool:
    """The right labels can be predicted, so that wrong ones differ from them."""
    return healthy.valid_end < CLEAR * healthy.valid_start


def jumps_at(step: int, faulty: Outcome) -> bool:
    """The loss of this step is far above those before it."""
    before = max(faulty.losses[max(0, step - BEFORE) : step], default=math.inf)
    return not math.isfinite(faulty.losses[step]) or faulty.losses[step] > JUMPED * before


def spikes(faulty: Outcome, healthy: Outcome) -> bool:
    """Late losses are far above those of the healthy run at the same steps."""
    late = len(healthy.losses) // 2
    return max(faulty.losses[late:], default=0.0) > 2 * max(healthy.losses[late:], default=math.inf)
