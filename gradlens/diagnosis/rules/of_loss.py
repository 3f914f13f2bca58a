"""Losses that get other numbers than they need, fall below zero, or are sums; and far targets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gradlens.diagnosis.course import LONG_ENOUGH, PERSISTENT, is_high, is_stuck
from gradlens.diagnosis.evidence import Evidence, is_summed
from gradlens.diagnosis.needs import GRAPH, LOSS, SAMPLES, SETUP
from gradlens.diagnosis.numbers import finite, largest, median, ratio, share
from gradlens.diagnosis.rule import (
    INSTABILITY,
    NO_PROGRESS,
    Rule,
    Sign,
    above,
    below,
    beyond,
    mostly,
    shown,
)
from gradlens.diagnosis.rules.learning_rate import signs_of_divergence as diverges
from gradlens.history.finding import Certainty


def of_scores(evidence: Evidence) -> Iterator[Sign]:
    if median(evidence.column("unlogged")) > 0:
        yield Sign(evidence.start_step, title=UNLOGGED, advice=LOG)
    else:
        yield from negative(evidence)


UNLOGGED = "The divergence gets probabilities, and needs their logarithms"
LOG = "KLDivLoss takes log-probabilities first, and probabilities as targets: use log_softmax."
NEGATIVE = -1e-3
"""A negative logarithm of a probability is at least 0, but for rounding."""
MOST = 0.1
"""Share of the steps at which the median sample's is below."""


def negative(evidence: Evidence, kind: str = "NllLoss") -> Iterator[Sign]:
    """Single losses below zero, of a kind of loss function that has none."""
    medians = evidence.column("loss_median")
    is_negative = medians < NEGATIVE
    if evidence.setup.loss.startswith(kind):
        words = "share of the steps at which the median sample's loss is negative"
        yield from mostly(evidence, is_negative, np.isfinite(medians), MOST, words)


REVERSED, ALWAYS = -0.5, 0.9
"""The loss over its function's value for the median sample, where the sign is reversed, and at what
share of the steps."""
FALLS, GROWS = 10.0, 5.0
"""The lowest losses below zero, over the first one's size, and the late gradient over the first
ones: a loss that has an end comes to it with smaller gradients."""


def maximised(evidence: Evidence) -> Iterator[Sign]:
    """An error that is made larger, or a loss that falls below zero without end."""
    step, size = evidence.start_step, max(abs(evidence.first_loss), 1.0)
    if evidence.option("maximize") > 0:
        is_error = bool(evidence.setup.loss) and evidence.first_loss > 0
        is_error |= evidence.late_loss > FALLS * size
        yield Sign(step, is_alarm=is_error, title=MAXIMIZED)
        return
    lowest = largest(np.sort(finite(evidence.loss.values))[:PERSISTENT])
    if evidence.has_adversary or evidence.length < LONG_ENOUGH or not lowest < -FALLS * size:
        return
    medians, gradients = evidence.at_loss("loss_median"), finite(evidence.column("grad_norm"))
    reversed_ = share(evidence.loss.values < REVERSED * medians, medians > 0)
    growth = median(gradients[-(len(gradients) // 4) :]) / median(gradients[:3])
    if reversed_ > ALWAYS or (evidence.setup.loss == "" and growth > GROWS):
        fall = below("loss at three steps", lowest, -FALLS * size)
        grown = above("late gradient, over the first ones", growth, GROWS)
        yield Sign(step, beyond(fall, grown), "very likely")


MAXIMIZED = "The optimizer makes the loss larger: maximize=True"


def summed(evidence: Evidence) -> Iterator[Sign]:
    samples = evidence.typical("samples")
    step = evidence.since(is_summed)
    if step is not None and samples > 1:
        numbers = (above("times that gradients are those of the mean loss", samples, 1.0),)
        is_alarm = not evidence.is_adaptive and (is_high(evidence) or is_stuck(evidence))
        yield Sign(step, numbers, is_alarm=is_alarm)
    yield from _of_batches(evidence)


UPDATES = 3
"""The least number of updates, and of the batches of each."""


def _of_batches(evidence: Evidence) -> Iterator[Sign]:
    """Gradients of several batches for each update, where the loss may not have been divided.

    Whether it was is known where single losses are; else this is a sign of a run that diverges.
    """
    updates = finite(evidence.column("updates"))
    count = round(len(updates) / max((updates > 0).sum(), 1))
    divided = median(ratio(evidence.column("loss"), evidence.column("loss_median")))
    if not UPDATES <= count <= len(updates) / UPDATES or divided < 2 / count:
        return
    if not evidence.is_adaptive and (is_high(evidence) or diverges(evidence)):
        number = above("batches whose gradients are added up for an update", count, 1)
        certainty: Certainty = "very likely" if math.isfinite(divided) else "consistent with"
        yield Sign(int(evidence.steps[0]), (number,), certainty, title=ADDED, advice=DIVIDE)


ADDED = "Gradients of several batches are added up for each update"
DIVIDE = (
    "Divide the loss by the number of batches that make an update: otherwise the learning rate is "
    "as many times higher."
)


# Targets ---------------------------------------------------------------------------------------

OVER_VARIANCE = 4.0
"""The late squared error over the targets' variance: predicting their mean has an error of 1."""
LARGE = 10.0
"""The root of the late error. The outputs of a new network are about 1."""
RISE = 1.5
"""The late loss over the first one; what rises further diverges."""
HUGE, USUAL = 1000.0, 5.0
"""The first loss of a run that diverges or learns nothing, where the rms of the inputs is no more
than the second."""


def far_targets(evidence: Evidence) -> Iterator[Sign]:
    for sign in negative(evidence, "BinaryCrossEntropy"):
        yield replace(sign, title=OUT_OF_RANGE, advice=BETWEEN)
    share = above(UNREACHABLE, evidence.typical("targets_beyond"), UNREACHED)
    step = evidence.step(np.isfinite(evidence.column("targets_beyond")))
    yield from shown(Sign(step, (share,), title=BEYOND, advice=END))
    late, variance, start = evidence.late_loss, evidence.chance, evidence.first_loss
    is_squared = evidence.setup.loss.startswith("Mse")
    # Far outputs have a larger error than those of zero.
    of_outputs = OVER_VARIANCE * evidence.target_square
    is_far = OVER_VARIANCE * variance < late < RISE * start and late > LARGE**2
    if is_squared and is_far and not late > of_outputs and evidence.length >= LONG_ENOUGH:
        numbers = (
            above("late error, over the variance of the targets", late / variance, OVER_VARIANCE),
            above("root of the late error", math.sqrt(late), LARGE),
        )
        yield Sign(evidence.start_step + LONG_ENOUGH - 1, numbers, "very likely")
    elif start > HUGE and (is_stuck(evidence) or diverges(evidence)):
        is_mean_of_errors = (is_squared or not evidence.setup.loss) and not evidence.is_sum
        is_of_outputs = start > of_outputs or median(evidence.of_data("rms")) > USUAL
        if is_mean_of_errors and not is_of_outputs:
            number = above("first loss", start, HUGE)
            yield Sign(evidence.start_step, (number,), "very likely", title=FIRST)


UNREACHED = 0.2
"""Share of the targets that outputs can't reach."""
UNREACHABLE = "share of the targets outside of the last activation's range"
BEYOND = "The targets are outside of the range of the last activation"
END = "Leave out the activation at the end of the network, or scale the targets to its range."


OUT_OF_RANGE = "The targets of the binary cross-entropy aren't between 0 and 1"
BETWEEN = (
    "Divide masks by 255, and give two classes the labels 0 and 1: with other targets, the loss "
    "falls below zero without end."
)
FIRST = "The loss is huge at the start: targets are far from zero, or it is a sum of many errors"

RULES = (
    Rule("target_scale", "The targets are far from zero, and the network hasn't reached them",
         needs=(LOSS,), find=far_targets, others=("lr_too_low",),
         explains=("class_imbalance", *INSTABILITY, *NO_PROGRESS),
         advice="Train on targets with mean 0 and variance 1: subtract their mean and divide by "
                "their standard deviation, and undo that in predictions."),
    Rule("loss_of_scores", "The loss needs log-probabilities, and gets other numbers",
         needs=(GRAPH,), find=of_scores,
         explains=("exploding_gradients", *INSTABILITY, *NO_PROGRESS),
         advice="Use CrossEntropyLoss on the scores of the last layer, without a softmax. "
                "NLLLoss needs a log_softmax before it; without one, it falls below zero however "
                "bad the predictions are."),
    Rule("loss_maximised", "The loss falls below zero without end: an error is made larger",
         needs=(LOSS,), find=maximised,
         explains=("exploding_gradients", *INSTABILITY, *NO_PROGRESS),
         advice="Look at the sign of the loss: optimizers make it smaller. A likelihood or a "
                "reward needs a minus sign, an error doesn't."),
    Rule("loss_sum", "The loss is summed over the batch",
         needs=(SETUP, SAMPLES), find=summed, others=("lr_too_high",),
         explains=(*INSTABILITY, *NO_PROGRESS),
         advice='Use reduction="mean", or divide the learning rate by the batch size. With Adam '
                "and its like it makes no difference."),
)  # fmt: skip
