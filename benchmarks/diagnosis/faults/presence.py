"""Whether a run has a fault that does harm, from its losses and those of the same run without it.

The rules of the diagnosis have no part in it: validation losses are compared.
"""

from __future__ import annotations

import math
from statistics import fmean

from benchmarks.diagnosis.loop import Outcome

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
