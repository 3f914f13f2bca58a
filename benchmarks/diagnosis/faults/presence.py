"""Whether a run has a fault that does harm, from its losses and those of the same run without it.

The rules of the diagnosis have no part in it: validation losses are compared.
"""

from __future__ import annotations

import math

from benchmarks.diagnosis.loop import Outcome

WORSE = 0.05
"""A run is worse if it lacks more than this share of what the healthy one takes off the loss."""
STALLED = 0.2
"""A run that is stuck takes off less than this share of what the healthy one takes off."""
BLOWN_UP = 5.0
"""A loss of so many times its start isn't noise: healthy runs of all problems stay below 2.5."""
RISEN = 0.1
"""A validation loss rises if it ends this share above its minimum."""
JUMPED = 2.0
"""A loss of so many times the largest of the steps before is a jump."""
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


def swings(faulty: Outcome, healthy: Outcome) -> bool:
    """Less is learnt, without divergence."""
    return hurts(faulty, healthy) and not diverges(faulty, healthy)


def overfits(faulty: Outcome, healthy: Outcome) -> bool:
    """The validation loss rises while the training loss is far below it."""
    risen = faulty.valid_end > (1 + RISEN) * faulty.valid_least
    return risen and faulty.end < 0.5 * faulty.valid_end


def jumps_at(step: int, faulty: Outcome) -> bool:
    """The loss of this step is far above those before it."""
    before = max(faulty.losses[max(0, step - BEFORE) : step])
    return not math.isfinite(faulty.losses[step]) or faulty.losses[step] > JUMPED * before
