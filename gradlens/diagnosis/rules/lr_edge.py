"""A learning rate at which training is barely stable."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import (
    LARGE_UPDATE,
    PERSISTENT,
    STUCK,
    calm,
    is_stuck,
    rise,
    spread,
    update_ratio,
)
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS
from gradlens.diagnosis.numbers import finite, largest, median, ratio, share, smallest
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above, below
from gradlens.diagnosis.rules.lr_too_high import signs as diverges
from gradlens.diagnosis.rules.vanishing_gradients import of_weights as vanishes
from gradlens.history.finding import Measured
from gradlens.history.lines import Floats

RISE = 1.3
"""The loss over that at the start at three steps, with large updates besides."""
HIGH, PEAK = 1.5, 2.2
"""The loss over that at the start: what it is at three steps, and its peak."""
EARLY = 1.7
"""The loss over that at the start, exceeded by three of the first steps: measured at most 1.5 in
healthy runs."""
ANY_UPDATE = 0.3
"""‖update‖/‖θ‖ at any step, of a run that has a peak of the loss besides, and either learns nothing
or has outgrown its first weights: measured at most 0.1 with other faults. (Those of healthy runs of
RMSprop and Adagrad are up to 0.6, too.)"""
GROWTH, FIRST_STEPS = 2.0, 20
"""The size of the weights over that at the start, after the first steps at most: what the network
began with is the smaller part of them, so that its initialisation is lost. It counts if the loss
has a peak in these steps: measured up to 2.1 in healthy runs, without any peak, and 2.5 and more
with one where Adam's rate is too high."""
OVERWRITTEN, COLLAPSE = 1.0, 1e-3
"""Limits of the first update. Above the first one of ‖update‖/‖θ‖, the weights after the update
consist mostly of the update. The second is for the smallest gradient norm of the next three steps,
over that before: a gradient that is so much smaller means that units are saturated, or the
probabilities that a loss is computed from."""
SHARPNESS = 1.2
"""The sharpness over its threshold. By itself, it is no fault: measured 2.2 (SGD) and up to 11
(Adam) in healthy runs."""
SHARE = 0.5
"""Share of the records of sharpness that are above the threshold."""


def find(evidence: Evidence) -> Iterator[Sign]:
    if diverges(evidence) or any(vanishes(evidence)):
        return
    numbers = [*_rises(evidence)]
    if numbers:
        updates, start = evidence.update_ratio, int(evidence.loss.steps[0])
        risen = evidence.first_rise(RISE, min(numbers[0].limit, PEAK))
        with np.errstate(invalid="ignore"):
            large = updates.steps[updates.values > ANY_UPDATE].astype(int).tolist()
        step = min([*large[:1], start if risen is None else risen])
        yield Sign(step, (*numbers, *_sharp(evidence)), "very likely")


def _rises(evidence: Evidence) -> Iterator[Measured]:
    level = evidence.start * spread(evidence)
    highest, update = rise(evidence) / spread(evidence), update_ratio(evidence)
    peak = largest(calm(evidence)) / level
    is_sharp = bool([*_sharp(evidence)])
    has_large_update = largest(evidence.update_ratio.values) > ANY_UPDATE
    if highest > RISE and (update > LARGE_UPDATE or is_sharp):
        yield above("loss over that at the start, at three steps", highest, RISE)
    elif peak > PEAK and (highest > HIGH or rise(evidence, _early(evidence)) > EARLY):
        yield above("loss at its peak, over that at the start", peak, PEAK)
    elif validation_rise(evidence) > HIGH and update > LARGE_UPDATE:
        name = "validation loss over the first one, at three validations"
        yield above(name, validation_rise(evidence), HIGH)
    elif is_stuck(evidence) and evidence.progress > STUCK and update > LARGE_UPDATE:
        yield above("late loss, over that without learning", evidence.progress, STUCK)
    elif has_large_update and is_stuck(evidence) and peak > HIGH:
        yield from _large_updates(evidence, peak)
    elif _collapse(evidence) < COLLAPSE:
        yield above(
            "size of the first update, over that of weights", _first_update(evidence), OVERWRITTEN
        )
        yield below(
            "gradient after the first updates, over that before", _collapse(evidence), COLLAPSE
        )
    elif has_large_update and first_growth(evidence) > GROWTH and first_peak(evidence) > HIGH:
        yield from _large_updates(evidence, first_peak(evidence))
        name = f"size of the weights after {FIRST_STEPS} steps at most, over that at the start"
        yield above(name, first_growth(evidence), GROWTH)
    else:
        return
    if update > LARGE_UPDATE:
        yield above("size of updates, over that of weights", update, LARGE_UPDATE)


def validation_rise(evidence: Evidence) -> float:
    """The validation loss over the first one, exceeded by three of them; NaN if it isn't known.

    Running statistics of normalisations are those of past weights: where updates are large, they
    don't fit, and the validation loss rises before that of training does.
    """
    losses = finite(evidence.valid_loss.values)
    return float(np.sort(losses)[-PERSISTENT] / losses[0]) if len(losses) > PERSISTENT else math.nan


def _large_updates(evidence: Evidence, peak: float) -> Iterator[Measured]:
    yield above("loss at its peak, over that at the start", peak, HIGH)
    most = largest(evidence.update_ratio.values)
    yield above("size of the largest update, over that of weights", most, ANY_UPDATE)


def _first_update(evidence: Evidence) -> float:
    """‖update‖/‖θ‖ of the first update; NaN if it isn't known."""
    found = evidence.update_ratio
    return largest(found.values[found.steps == evidence.steps[:1].sum()])


def _collapse(evidence: Evidence) -> float:
    """The smallest gradient after the first updates over that before, if they overwrite weights."""
    norms = evidence.column("grad_norm")[: 1 + PERSISTENT]
    if not _first_update(evidence) > OVERWRITTEN or not norms[:1].sum() > 0:
        return math.nan
    return smallest(norms[1:]) / float(norms[0])


def first_peak(evidence: Evidence) -> float:
    """The highest loss of the first steps over that at the start."""
    return largest(_early(evidence)) / evidence.start


def _early(evidence: Evidence) -> Floats:
    """The losses of the first steps."""
    steps = evidence.loss.steps
    return evidence.level[steps <= steps[:1].sum() + FIRST_STEPS]


def first_growth(evidence: Evidence) -> float:
    """The size of the weights after the first steps over that before; NaN if it isn't known."""
    sizes = evidence.by_name("weight_rms")
    table = sizes.matrix(evidence.trained)
    early = np.flatnonzero(sizes.steps <= sizes.steps[:1].sum() + FIRST_STEPS)
    return median(ratio(table[:, early[-1]], table[:, 0])) if early.size else math.nan


def _sharp(evidence: Evidence) -> Iterator[Measured]:
    ratios = evidence.part("Stability", "ratio")
    known = ratios.finite
    if known.sum() >= PERSISTENT and share(ratios.values > SHARPNESS, known) > SHARE:
        yield above("sharpness over its threshold", largest(ratios.values), SHARPNESS)


RULE = Rule(
    fault="lr_edge",
    title="The learning rate is at the edge of stability, or above it",
    needs=(LOSS,),
    find=find,
    advice="Divide the learning rate by 3.",
    others=("momentum_high", "zero_grad_missing", "batch_too_small"),
    explains=("overfitting", *INSTABILITY, *NO_PROGRESS),
    sources=("Cohen et al. (2021), arXiv:2103.00065: sharpness and 2/(learning rate)",),
)
