"""Targets that are far from what a network gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gradlens.diagnosis.course import LONG_ENOUGH, is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS
from gradlens.diagnosis.numbers import median
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above
from gradlens.diagnosis.rules.lr_too_high import signs as diverges
from gradlens.diagnosis.rules.of_loss import negative

OVER_VARIANCE = 4.0
"""The late squared error over the targets' variance: predicting their mean has an error of 1."""
LARGE = 10.0
"""The root of the late error. The outputs of a new network are about 1."""
RISE = 1.5
"""The late loss over the first one; what rises further diverges."""
HUGE, USUAL = 1000.0, 5.0
"""The first loss of a run that diverges or learns nothing, where the rms of the inputs is no more
than the second."""


def find(evidence: Evidence) -> Iterator[Sign]:
    for sign in negative(evidence, "BinaryCrossEntropy"):
        yield replace(sign, title=OUT_OF_RANGE, advice=BETWEEN)
    yield from _beyond(evidence)
    late, variance, start = evidence.late_loss, evidence.chance, evidence.first_loss
    is_squared = evidence.setup.loss.startswith("Mse")
    is_far = OVER_VARIANCE * variance < late < RISE * start and late > LARGE**2
    if is_squared and is_far and evidence.length >= LONG_ENOUGH:
        numbers = (
            above("late error, over the variance of the targets", late / variance, OVER_VARIANCE),
            above("root of the late error", math.sqrt(late), LARGE),
        )
        yield Sign(int(evidence.loss.steps[0]) + LONG_ENOUGH - 1, numbers, "very likely")
    elif start > HUGE and _is_mean_of_numbers(evidence) and _fails(evidence):
        number = above("first loss", start, HUGE)
        yield Sign(int(evidence.loss.steps[0]), (number,), "very likely", title=FIRST)


def _beyond(evidence: Evidence) -> Iterator[Sign]:
    """Targets that the last activation can't reach."""
    beyond = evidence.column("targets_beyond")
    if median(beyond) > MOST:
        number = above(
            "share of the targets outside of the last activation's range", median(beyond), MOST
        )
        yield Sign(int(evidence.steps[np.isfinite(beyond)][0]), (number,), title=BEYOND, advice=END)


MOST = 0.1
"""Share of the targets that outputs can't reach."""
BEYOND = "The targets are outside of the range of the last activation"
END = "Leave out the activation at the end of the network, or scale the targets to its range."


def _fails(evidence: Evidence) -> bool:
    return is_stuck(evidence) or bool(diverges(evidence))


def _is_mean_of_numbers(evidence: Evidence) -> bool:
    """Whether the inputs are as usual, and the loss may be a mean of errors."""
    is_error = evidence.setup.loss.startswith("Mse") or not evidence.setup.loss
    return is_error and not evidence.is_sum and not evidence.typical("input_rms") > USUAL


OUT_OF_RANGE = "The targets of the binary cross-entropy aren't between 0 and 1"
BETWEEN = (
    "Divide masks by 255, and give two classes the labels 0 and 1: with other targets, the loss "
    "falls below zero without end."
)
FIRST = "The loss is huge at the start: targets are far from zero, or it is a sum of many errors"

RULE = Rule(
    fault="target_scale",
    title="The targets are far from zero, and the network hasn't reached them",
    needs=(LOSS,),
    find=find,
    advice="Train on targets with mean 0 and variance 1: subtract their mean and divide by their "
    "standard deviation, and undo that in predictions.",
    others=("lr_too_low",),
    explains=("class_imbalance", *INSTABILITY, *NO_PROGRESS),
)
