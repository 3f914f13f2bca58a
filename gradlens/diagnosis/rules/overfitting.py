"""A validation loss that rises while the training loss falls."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS, VALIDATION
from gradlens.diagnosis.numbers import finite, median
from gradlens.diagnosis.rule import Rule, Sign, above

TIMES, CERTAIN = 1.1, 1.15
"""The latest validation losses over the lowest one: measured at most 1.06 in healthy runs that are
far below it in training. Up to the larger limit, it is a notice."""
RISE, LASTING_RISE = 0.05, 0.025
"""The same rise, over the loss by chance: measured up to 0.06, once 0.18, in healthy runs, and 0.03
to 0.11 in faulty ones. The smaller one is enough if the rise lasts."""
LASTS = 5
"""Validations in the last quarter of the run, all of them above the first limit, of such a rise."""
GAP = 2.0
"""The validation loss over the training loss, each over what it was at the first validation: a loss
that is a sum may be validated as a mean."""
EVALUATIONS = 2
"""Consecutive validations at the end, which must all be high."""


def find(evidence: Evidence) -> Iterator[Sign]:
    valid = evidence.valid_loss
    values, steps = valid.values[valid.finite], valid.steps[valid.finite]
    if len(values) <= EVALUATIONS:
        return
    place = int(values.argmin())
    lowest, latest = float(values[place]), float(values[-EVALUATIONS:].min())
    train = evidence.loss
    present = evidence.present_loss
    before = finite(train.values[train.steps <= max(steps[0], train.steps[0])])[-10:]
    gap = (latest / values[0]) / (present / median(before))
    around = (train.steps >= steps[max(place - 1, 0)]) & (train.steps <= steps[place])
    falls = present < median(train.values[around])
    reference = evidence.chance if np.isfinite(evidence.chance) else values[0]
    rise = (LASTING_RISE if _lasts(evidence, TIMES * lowest) else RISE) * reference
    rises = latest > TIMES * lowest > 0 and latest - lowest > rise
    if rises and place < len(values) - EVALUATIONS and gap > GAP and falls:
        is_alarm = latest > CERTAIN * lowest
        limit = CERTAIN if is_alarm else TIMES
        numbers = (
            above("validation loss, over its minimum", latest / lowest, limit),
            above("validation loss, over the training loss, both over their start", gap, GAP),
        )
        yield Sign(int(steps[place]), numbers, "very likely", is_alarm)


def _lasts(evidence: Evidence, limit: float) -> bool:
    """Whether many validations, all of those late in the run, are above a limit."""
    late = evidence.valid_loss.values[evidence.is_late(evidence.valid_loss.steps)]
    return len(finite(late)) >= LASTS and bool((finite(late) > limit).all())


RULE = Rule(
    fault="overfitting",
    title="The validation loss rises while the training loss falls",
    needs=(LOSS, VALIDATION),
    find=find,
    advice="Stop at the step of the minimum, which is the step of this finding; or use more "
    "data, augmentation, weight decay or dropout.",
    others=("label_noise",),
)
