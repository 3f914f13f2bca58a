"""A learning rate at which training diverges."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import is_stuck, spread, update_ratio
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS
from gradlens.diagnosis.numbers import first, largest, median, ratio, share
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above
from gradlens.history.finding import Measured

PEAK, HIGH, SHARE, FEWEST = 5.0, 3.0, 0.03, 3
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


def find(evidence: Evidence) -> Iterator[Sign]:
    numbers = signs(evidence)
    if numbers:
        step = evidence.first_rise(SEEN, HIGH)
        start = int(evidence.loss.steps[0])
        yield Sign(start if step is None else step, numbers, "very likely")


def signs(evidence: Evidence) -> tuple[Measured, ...]:
    """The numbers that show it; none if nothing does."""
    losses = evidence.level / (evidence.start * spread(evidence))
    found = []
    with np.errstate(invalid="ignore"):
        high = losses > HIGH
        peak = largest(losses)
    if peak > PEAK and high.sum() >= FEWEST * evidence.width and share(high) >= SHARE:
        found.append(above("loss at its peak, over that at the start", peak, PEAK))
    if evidence.ends_badly and _grows_before_the_end(evidence):
        found.append(
            above("steps at which the loss is not finite", (~evidence.loss.finite).sum(), 0)
        )
    is_bad = _grows_before_the_end if evidence.ends_badly else is_stuck
    if is_bad(evidence):
        growth, update = _growth(evidence), update_ratio(evidence)
        if growth > GROWTH:
            found.append(above("size of the weights, over that at the start", growth, GROWTH))
        if update > UPDATE:
            found.append(above("size of updates, over that of weights", update, UPDATE))
    return tuple(found)


def _grows_before_the_end(evidence: Evidence) -> bool:
    """Whether the loss or the weights have blown up before the loss was no number any more.

    Without that, the NaN has another origin, such as a sample or a logarithm.
    """
    place = first(~evidence.loss.finite) or 0
    with np.errstate(invalid="ignore"):
        rises = bool((evidence.level[max(place - LATEST, 0) : place] > SEEN * evidence.start).any())
    updates, weights = evidence.by_name("update_rms"), evidence.by_name("weight_rms")
    names = tuple(name for name in evidence.trained if name in updates.values)
    before = updates.steps < evidence.loss.steps[place]
    if not names or updates.steps.shape != weights.steps.shape or not before.any():
        return rises
    ours, theirs = (each.matrix(names)[:, before] for each in (updates, weights))
    with np.errstate(invalid="ignore"):  # an update of weights to infinity is infinite
        return rises or bool((ours > OVERWRITES * theirs).any(axis=0).any())


def _growth(evidence: Evidence) -> float:
    sizes = evidence.by_name("weight_rms")
    if not len(sizes.steps):
        return float("nan")
    table = sizes.matrix(evidence.trained)
    return median(ratio(table[:, -1], table[:, 0]))


RULE = Rule(
    fault="lr_too_high",
    title="The learning rate is too high: training diverges",
    needs=(LOSS,),
    find=find,
    advice="Divide the learning rate by 10.",
    others=("loss_sum", "momentum_high", "exploding_gradients"),
    explains=("weight_decay_high", "overfitting", *INSTABILITY, *NO_PROGRESS),
)  # fmt: skip
