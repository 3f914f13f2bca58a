"""Nothing is learnt, although the network is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS
from gradlens.diagnosis.numbers import largest, smooth
from gradlens.diagnosis.rule import Rule, Sign, above
from gradlens.history.lines import Floats

LATE, EVER = 0.97, 0.95
"""The loss over that by chance, at the end and ever: measured at most 0.96 in healthy runs, and
0.98 to 1.01 in faulty ones."""
HIGHEST = 1.3
"""Above this, it isn't the labels that keep the loss high."""
STEPS = 100
"""A run that is shorter may be before the end of a plateau."""
PARTS = 8
"""The loss is looked at in so many parts of the run, since that of single batches varies."""
AS_FIRST, AS_EARLY = 0.78, 0.955
"""Where the loss by chance isn't known: the late loss over the first one, and over that of the
second eighth of the run, the same of the validation loss. Measured at most 0.57 and 0.91 in healthy
runs but one (0.8 and 0.95), and 0.8 to 1 and 0.96 to 1 where 80 % and more of the targets are
random, so that less than a fifth of what can be learnt is learnt."""
FALLS = 0.93
"""Where it is known: the late loss over that in the middle of the run. A loss that still falls, of
a network that began far above chance, is no sign."""


def find(evidence: Evidence) -> Iterator[Sign]:
    if evidence.length < STEPS or evidence.ends_badly or largest(evidence.column("lr")) == 0:
        return
    is_known = np.isfinite(evidence.chance)
    yield from _by_chance(evidence) if is_known else _by_the_first_loss(evidence)


def _by_the_first_loss(evidence: Evidence) -> Iterator[Sign]:
    """Of a loss whose value by chance isn't known; it must be positive to be compared."""
    course, valid = _course(evidence.loss.values), _course(evidence.valid_loss.values)
    if len(course) < PARTS or not min(evidence.first_loss, *course) > 0:
        return
    late, early = evidence.late_loss / evidence.first_loss, evidence.late_loss / course[1]
    validated = valid[-1] / valid[1] if len(valid) > 1 else math.nan
    if HIGHEST > late > AS_FIRST and early > AS_EARLY and not validated < AS_EARLY:
        numbers = [
            above("late loss, over the first one", late, AS_FIRST),
            above("late loss, over that of the second eighth of the run", early, AS_EARLY),
        ]
        if math.isfinite(validated):
            numbers.append(above("the same of the validation loss", validated, AS_EARLY))
        yield Sign(
            int(evidence.loss.steps[0]) + STEPS - 1,
            tuple(numbers),
            "consistent with",
            is_alarm=math.isfinite(validated),
            title="Next to nothing is learnt: the loss hardly falls after the first steps",
        )


def _course(losses: Floats) -> Floats:
    """Medians of the parts of a run."""
    return smooth(losses, -(-len(losses) // PARTS))


def _by_chance(evidence: Evidence) -> Iterator[Sign]:
    """Of a loss that has come down to chance, and no further."""
    course = _course(evidence.loss.values / evidence.chance)
    late = evidence.late_loss / evidence.chance
    with np.errstate(invalid="ignore"):
        still_falls = course[-1] < FALLS * course[len(course) // 2]
        if LATE <= late < HIGHEST and (course > EVER).all() and not still_falls:
            numbers = (
                above("late loss, over that by chance", late, LATE),
                above(
                    "lowest loss in any eighth of the run, over that by chance", course.min(), EVER
                ),
            )
            yield Sign(int(evidence.loss.steps[0]) + STEPS - 1, numbers, "consistent with")


RULE = Rule(
    fault="labels_random",
    title="Nothing is learnt: the loss stays at that of a guess",
    needs=(LOSS,),
    find=find,
    advice="Look at pairs of inputs and labels. Train on ten samples: if the network can't learn "
    "them by heart, the fault is in the network, the loss or the learning rate; if it can, labels "
    "and inputs have nothing to do with each other, or the task has a plateau at its start.",
    others=("lr_too_low", "vanishing_gradients", "input_constant"),
    explains=("dead_units",),
    sources=("Zhang et al. (2017), arXiv:1611.03530: networks fit random labels",),
)
