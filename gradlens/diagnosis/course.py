"""The course of a run's loss: rises, jumps, and none of the progress that there should be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.numbers import Truths, finite, largest, median
from gradlens.history.lines import Floats

SETTLING = 5
"""Steps at the start, in which losses of healthy runs rise as well."""
PERSISTENT = 3
"""Steps that a rise takes, so that it isn't one batch."""
STUCK = 0.95
"""The late loss over that without learning, of a network that has learnt nothing."""
LONG_ENOUGH = 50
"""Steps after which a network should have learnt something."""
RISE, SMALL_RISE = 1.5, 1.3
"""The loss over that at the start: measured 1 to 1.8 for single steps of healthy runs. The small
one counts with large updates besides."""
LARGE_UPDATE = 0.03
"""‖update‖/‖θ‖: about 1e-3 is usual, and 1e-2 is common early in training."""


def rise(evidence: Evidence) -> float:
    """The loss over that at the start, exceeded by three steps; ∞ if it ends as no number."""
    if evidence.ends_badly:
        return math.inf
    found = np.sort(finite(evidence.loss.values[SETTLING:]))
    return float(found[-PERSISTENT]) / evidence.start if len(found) >= PERSISTENT else math.nan


def is_stuck(evidence: Evidence) -> bool:
    """Whether a run that is long enough has learnt nothing."""
    return evidence.ends_badly or (evidence.length >= LONG_ENOUGH and evidence.progress > STUCK)


def update_ratio(evidence: Evidence) -> float:
    """‖update‖/‖θ‖ of weights: the median after the first steps; NaN if it isn't known."""
    found = evidence.update_ratio
    return median(found.values[found.steps > (found.steps[:1].sum() + SETTLING - 1)])


def is_high(evidence: Evidence) -> bool:
    """Whether there are signs of a learning rate that is too high for this loss."""
    highest, update = rise(evidence), update_ratio(evidence)
    return highest > RISE or (
        update > LARGE_UPDATE and (highest > SMALL_RISE or is_stuck(evidence))
    )


# Jumps -----------------------------------------------------------------------------------------

WINDOW = 12
"""Steps before a jump that it is compared with."""
DEVIATIONS = 9.0
"""A jump is so many median absolute deviations above the median of the steps before."""
OVER_CHANCE = 1.5
"""A jump is to so many times the loss by chance, which healthy runs don't come back to."""
TWICE = 2.0
"""Times the loss of the median sample of the steps around it, of a batch in which it is above
chance: measured at most 0.65 of chance in healthy runs that have learnt, and 1.2 and more where
most labels are wrong."""
SUDDEN, JUST_BEFORE = 0.25, 2
"""The share of a jump that the two steps before it may have: a bad sample or batch comes suddenly
(measured at most 0.1), and an instability builds up (0.5)."""
MOST_JUMPS = 0.05
"""Of the steps: what happens more often is no jump."""


@dataclass(frozen=True)
class Jump:
    """A step at which the loss was much higher than before, and came back afterwards.

    ``place`` is that in the loss. ``height`` is the loss over that by chance, and ``share`` that of
    one sample (``largest_share``).
    """

    place: int
    step: int
    height: float
    share: float


def jumps(evidence: Evidence) -> tuple[Jump, ...]:
    """The jumps of the loss; none where there are so many that it is unstable."""
    values, reference = evidence.loss.values, evidence.start
    with np.errstate(invalid="ignore"):
        places = np.flatnonzero((values > OVER_CHANCE * reference) | _of_most_samples(evidence))
    if not places.size or len(places) > max(MOST_JUMPS * len(values), 1):
        return ()
    return tuple(
        Jump(place, int(evidence.loss.steps[place]), values[place] / reference,
             largest_share(evidence, place))
        for place in map(int, places)
        if _is_jump(values, place)
    )  # fmt: skip


def _of_most_samples(evidence: Evidence) -> Truths:
    """At which steps most samples have a loss above chance, unlike just before and after."""
    values = evidence.column("loss_median")
    found = np.zeros(len(evidence.loss.values), dtype=np.bool_)
    if len(values) == len(found) > 2:
        limit = np.maximum(evidence.chance, TWICE * np.maximum(values[:-2], values[2:]))
        found[1:-1] = values[1:-1] > limit
    return found


def _is_jump(values: Floats, place: int) -> bool:
    before, after = values[max(place - WINDOW, 0) : place], finite(values[place + 1 :][:WINDOW])
    if len(before) < WINDOW:
        return False
    middle = median(before)
    deviation = median(np.abs(before - middle))
    height = values[place] - middle
    is_sudden = largest(before[-JUST_BEFORE:]) < middle + SUDDEN * height
    comes_back = not after.size or float(after.min()) < middle + height / 2
    return is_sudden and comes_back and bool(height > DEVIATIONS * deviation)


SMALLEST = 8
"""Samples of a batch: in a smaller one, a single sample often has most of the loss."""


def largest_share(evidence: Evidence, place: int) -> float:
    """The share of one sample in the batch's squared gradient norms, or in its loss.

    It is that of the loss where there are no norms of this step; NaN if neither is known, or if the
    batch is small.
    """
    if evidence.typical("samples") < SMALLEST:
        return math.nan
    suspects = evidence.suspects(int(evidence.loss.steps[place]))
    if suspects and not math.isnan(suspects[0].share):
        return suspects[0].share
    if len(evidence.steps) != len(evidence.loss.steps):
        return math.nan
    most, count = evidence.column("loss_max")[place], evidence.column("samples")[place]
    total = evidence.loss.values[place] * count
    return float(most / total) if 0 < total < math.inf and count > 1 else math.nan
