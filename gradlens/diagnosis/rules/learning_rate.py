"""A learning rate at which training diverges, is barely stable, or learns nothing in its time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import (
    LARGE_UPDATE,
    LONG_ENOUGH,
    PAST_PLATEAU,
    PERSISTENT,
    SMALL_RISE,
    STUCK,
    calm,
    growth,
    is_stuck,
    moves_far,
    rise,
    spread,
    update_ratio,
    warms_up,
)
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS, UPDATE_SIZES
from gradlens.diagnosis.numbers import finite, first, largest, median, share, smallest
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above, below, beyond
from gradlens.diagnosis.rules.of_gradients import begins_small
from gradlens.history.finding import Measured
from gradlens.history.lines import field_line

# Too high -------------------------------------------------------------------------------------

TOP, HIGH, SHARE, FEWEST = 5.0, 3.0, 0.03, 3
"""The loss over that at the start: its peak, and what it is at 3 % of the steps and at three steps.
The peak was measured to be 1 to 1.8 in healthy runs, and 8 to 700 in faulty ones."""
GROWTH = 20.0
"""The size of weights over that at the start: measured 1 to 9 in healthy runs, and 46 and more in
faulty ones."""
UPDATE = 0.1
"""‖update‖/‖θ‖. It says nothing by itself: after the loss has blown up, weights are huge."""
SEEN, LATEST = 1.5, 20
"""A rise over the start that can be seen, and in how many of the steps before a loss that isn't
finite."""
OVERWRITES = 1.0
"""‖update‖/‖θ‖ of a weight that consists mostly of the update afterwards."""


def too_high(evidence: Evidence) -> Iterator[Sign]:
    if numbers := signs_of_divergence(evidence):
        yield Sign(evidence.first_rise(SEEN, HIGH), numbers, "very likely")


def signs_of_divergence(evidence: Evidence) -> tuple[Measured, ...]:
    """The numbers that show it; none if nothing does."""
    losses = evidence.level / (evidence.start * spread(evidence))
    found = []
    high = losses > HIGH
    peak = largest(losses)
    is_lasting = high.sum() >= FEWEST * evidence.width and share(high) >= SHARE
    if peak > TOP and is_lasting and moves_far(evidence):
        found.append(above("loss at its peak, over that at the start", peak, TOP))
    is_bad = _grows_before_the_end if evidence.ends_badly else is_stuck
    if is_bad(evidence):
        lost = (~evidence.loss.finite).sum() if evidence.ends_badly else 0
        found += [
            above("steps at which the loss is not finite", lost, 0),
            above("size of the weights, over that at the start", growth(evidence), GROWTH),
            above("size of updates, over that of weights", update_ratio(evidence), UPDATE),
        ]
    return beyond(*found)


def _grows_before_the_end(evidence: Evidence) -> bool:
    """Whether the loss or the weights have blown up before the loss was no number any more.

    Without that, the NaN has another origin, such as a sample or a logarithm.
    """
    place = first(~evidence.loss.finite) or 0
    rises = bool((evidence.level[max(place - LATEST, 0) : place] > SEEN * evidence.start).any())
    updates, weights = evidence.by_name("update_rms"), evidence.by_name("weight_rms")
    names = tuple(name for name in evidence.trained if name in updates.values)
    before = updates.steps < evidence.loss.steps[place]
    if not names or updates.steps.shape != weights.steps.shape or not before.any():
        return rises
    ours, theirs = (each.matrix(names)[:, before] for each in (updates, weights))
    return rises or bool((ours > OVERWRITES * theirs).any())


# At the edge ----------------------------------------------------------------------------------

PERSISTS, PEAK = 1.5, 2.2
"""The loss over that at the start: what it is at three steps, and its peak."""
EARLY, FIRST_STEPS = 1.7, 20
"""The loss over that at the start, exceeded by three of the first steps: measured at most 1.5 in
healthy runs."""
ANY_UPDATE = 0.3
"""‖update‖/‖θ‖ at any step, of a run that has a peak of the loss besides, and either learns nothing
or has outgrown its first weights: measured at most 0.1 with other faults. (Those of healthy runs of
RMSprop and Adagrad are up to 0.6, too.)"""
OUTGROWN = 2.0
"""The size of the weights over that at the start, after the first steps at most: what the network
began with is the smaller part of them, so that its initialisation is lost. It counts if the loss
has a peak in these steps: measured up to 2.1 in healthy runs, without any peak, and 2.5 and more
with one where Adam's rate is too high."""
COLLAPSE = 1e-3
"""The smallest gradient norm of the three steps after a first update that overwrites the weights,
over that before: a gradient that is so much smaller means that units are saturated, or the
probabilities that a loss is computed from."""
SHARPNESS, OFTEN = 1.2, 0.5
"""The sharpness over its threshold, and at what share of its records. By itself, it is no fault:
measured 2.2 (SGD) and up to 11 (Adam) in healthy runs."""
RAISES = 0.2
"""The share of records at which the rate is 1.2 times that at which the update raises the loss of
its own batch: measured at most 0.09 in healthy runs, and 0.27 to 0.61 where training diverges."""
SHARP = (
    ("Stability", OFTEN, "sharpness over its threshold"),
    ("CriticalSharpness", RAISES, "rate over that at which steps raise the loss of their batch"),
)


def at_the_edge(evidence: Evidence) -> Iterator[Sign]:
    if signs_of_divergence(evidence) or any(begins_small(evidence)):
        return
    numbers = [*_rises(evidence)]
    if numbers:
        updates = evidence.update_ratio
        risen = evidence.first_rise(SMALL_RISE, min(numbers[0].limit, PEAK))
        large = updates.steps[updates.values > ANY_UPDATE].astype(int).tolist()
        yield Sign(min([*large[:1], risen]), (*numbers, *_sharp(evidence)), "very likely")


def _rises(evidence: Evidence) -> Iterator[Measured]:
    by_chance, update = spread(evidence), update_ratio(evidence)
    peak = largest(calm(evidence)) / evidence.start
    highest, peak = rise(evidence) / by_chance, peak / by_chance
    early = evidence.level[evidence.loss.steps <= evidence.loss.steps[:1].sum() + FIRST_STEPS]
    is_sharp, most = any(_sharp(evidence)), largest(evidence.update_ratio.values)
    early_peak = np.fmax(peak, largest(early) / evidence.start)
    # Adapters of frozen weights begin near zero, and these stay what they were.
    has_outgrown = not evidence.setup.frozen and growth(evidence, FIRST_STEPS) > OUTGROWN
    is_lost = is_stuck(evidence) or has_outgrown
    if highest > SMALL_RISE and (update > LARGE_UPDATE or is_sharp):
        yield above("loss over that at the start, at three steps", highest, SMALL_RISE)
    elif peak > PEAK and moves_far(evidence) and (
        highest > PERSISTS or rise(evidence, early) > EARLY
    ):  # fmt: skip
        yield above("loss at its peak, over that at the start", peak, PEAK)
    elif _validation_rise(evidence) > PERSISTS and update > LARGE_UPDATE:
        name = "validation loss over the first one, at three validations"
        yield above(name, _validation_rise(evidence), PERSISTS)
    elif evidence.length >= PAST_PLATEAU and evidence.progress > STUCK and update > LARGE_UPDATE:
        yield above("late loss, over that without learning", evidence.progress, STUCK)
    elif most > ANY_UPDATE and early_peak > PERSISTS and is_lost:
        yield above("loss at its peak, over that at the start", early_peak, PERSISTS)
        yield above("size of the largest update, over that of weights", most, ANY_UPDATE)
    elif _collapse(evidence) < COLLAPSE:
        name = "gradient after a first update that overwrites the weights, over that before"
        yield below(name, _collapse(evidence), COLLAPSE)
    else:
        return
    if update > LARGE_UPDATE:
        yield above("size of updates, over that of weights", update, LARGE_UPDATE)


def _validation_rise(evidence: Evidence) -> float:
    """The validation loss over the first one, exceeded by three of them; NaN if it isn't known.

    Running statistics of normalisations are those of past weights: where updates are large, they
    don't fit, and the validation loss rises before that of training does.
    """
    losses = finite(evidence.valid_loss.values)
    return float(np.sort(losses)[-PERSISTENT] / losses[0]) if len(losses) > PERSISTENT else math.nan


def _collapse(evidence: Evidence) -> float:
    """The smallest gradient after the first update over that before, if it overwrites weights."""
    updates, norms = evidence.update_ratio, evidence.column("grad_norm")[: 1 + PERSISTENT]
    first_update = largest(updates.values[updates.steps == evidence.steps[:1].sum()])
    if not first_update > OVERWRITES or not norms[:1].sum() > 0:
        return math.nan
    return smallest(norms[1:]) / float(norms[0])


def _sharp(evidence: Evidence) -> Iterator[Measured]:
    for kind, often, name in SHARP:
        ratios = field_line(evidence.records(kind), "ratio")
        known = ratios.finite
        if known.sum() >= PERSISTENT and share(ratios.values > SHARPNESS, known) > often:
            yield above(name, largest(ratios.values), SHARPNESS)


# Too low --------------------------------------------------------------------------------------

TINY = 5e-4
"""‖update‖/‖θ‖: measured 1e-3 and more in healthy runs, and at most 3e-4 in faulty ones."""
DEAD, RECORDS = 0.5, 3
"""Share of a ReLU's units that are dead at the last records, so that gradients vanish."""
ENOUGH, LOWERED = 5e-3, 0.1
"""The first updates over the weights, of a rate that isn't low; and the latest rate over the
highest, of a schedule."""
PRETRAINED = 0.5
"""The first loss over chance: a network that was trained before is tuned by small steps."""


def too_low(evidence: Evidence) -> Iterator[Sign]:
    found = median(evidence.update_ratio.values)
    if evidence.length < LONG_ENOUGH or not 0 < found < TINY or _has_another_cause(evidence):
        return
    losses = evidence.loss.values
    falls = evidence.late_loss < STUCK * median(losses[: -(-len(losses) // 8)])
    if evidence.progress > STUCK and not evidence.ends_badly and not falls:
        numbers = (
            below("size of updates, over that of weights", found, TINY),
            above("late loss, over that without learning", evidence.progress, STUCK),
        )
        yield Sign(evidence.start_step + LONG_ENOUGH - 1, numbers, "very likely")


def _has_another_cause(evidence: Evidence) -> bool:
    """Whether updates are tiny for another reason: units that died, or a rate that was higher.

    A network that large updates have broken at the start is worse off with still larger ones. A
    rate that grows isn't judged, nor one with which a trained network is tuned.
    """
    dead = [median(shares[-RECORDS:]) for shares in evidence.by_name("dead").values.values()]
    rates, updates = finite(evidence.column("lr")), finite(evidence.update_ratio.values)
    return (
        bool(signs_of_divergence(evidence))
        or evidence.first_loss < PRETRAINED * evidence.chance
        or warms_up(evidence)
        or largest(dead) > DEAD
        or bool(rates.size and rates[-1] < LOWERED * rates.max())
        or largest(updates[:RECORDS]) > ENOUGH
        or largest(evidence.level[:FIRST_STEPS]) > SMALL_RISE * evidence.start
    )


RULES = (
    Rule("lr_too_high", "The learning rate is too high: training diverges",
         needs=(LOSS,), find=too_high, others=("loss_sum", "momentum_high", "exploding_gradients"),
         explains=("weight_decay_high", "overfitting", *INSTABILITY, *NO_PROGRESS),
         advice="Divide the learning rate by 10."),
    Rule("lr_edge", "The learning rate is at the edge of stability, or above it",
         needs=(LOSS,), find=at_the_edge,
         others=("momentum_high", "zero_grad_missing", "batch_too_small"),
         explains=("overfitting", *INSTABILITY, *NO_PROGRESS),
         sources=("Cohen et al. (2021), arXiv:2103.00065: sharpness and 2/(learning rate)",),
         advice="Divide the learning rate by 3."),
    Rule("lr_too_low", "The learning rate is too low: updates are tiny and nothing is learnt",
         needs=(LOSS, UPDATE_SIZES), find=too_low,
         others=("vanishing_gradients", "adam_epsilon", "clipping_always"),
         explains=("labels_random",),
         advice="Multiply the learning rate by 10, and again until the loss falls."),
)  # fmt: skip
