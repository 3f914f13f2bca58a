"""Targets of a regression that are far from what a network gives."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradlens.diagnosis.course import LONG_ENOUGH
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import CHANCE, LOSS
from gradlens.diagnosis.rule import Rule, Sign, above

OVER_VARIANCE = 4.0
"""The late squared error over the targets' variance: predicting their mean has an error of 1."""
LARGE = 10.0
"""The root of the late error. The outputs of a new network are about 1."""
RISE = 1.5
"""The late loss over the first one; what rises further diverges."""


def find(evidence: Evidence) -> Iterator[Sign]:
    late, variance = evidence.late_loss, evidence.chance
    if not evidence.setup.loss.startswith("Mse") or evidence.length < LONG_ENOUGH:
        return
    if OVER_VARIANCE * variance < late < RISE * evidence.first_loss and late > LARGE**2:
        numbers = (
            above("late error, over the variance of the targets", late / variance, OVER_VARIANCE),
            above("root of the late error", math.sqrt(late), LARGE),
        )
        yield Sign(int(evidence.loss.steps[0]) + LONG_ENOUGH - 1, numbers, "very likely")


RULE = Rule(
    fault="target_scale",
    title="The targets are far from zero, and the network hasn't reached them",
    needs=(LOSS, CHANCE),
    find=find,
    advice="Train on targets with mean 0 and variance 1: subtract their mean and divide by their "
    "standard deviation, and undo that in predictions.",
    others=("lr_too_low",),
    explains=("lr_too_low", "dead_units", "labels_random"),
)
