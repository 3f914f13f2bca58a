"""Nothing is learnt, although the network is trained."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import CHANCE
from gradlens.diagnosis.numbers import largest, smooth
from gradlens.diagnosis.rule import Rule, Sign, above

LATE, EVER = 0.97, 0.95
"""The loss over that by chance, at the end and ever: measured at most 0.96 in healthy runs, and
0.98 to 1.01 in faulty ones."""
HIGHEST = 1.3
"""Above this, it isn't the labels that keep the loss high."""
STEPS = 100
"""A run that is shorter may be before the end of a plateau."""
PARTS = 8
"""The loss is looked at in so many parts of the run, since that of single batches varies."""


def find(evidence: Evidence) -> Iterator[Sign]:
    if evidence.length < STEPS or evidence.ends_badly or largest(evidence.column("lr")) == 0:
        return
    losses = evidence.loss.values / evidence.chance
    course = smooth(losses, -(-len(losses) // PARTS))
    late = evidence.late_loss / evidence.chance
    with np.errstate(invalid="ignore"):
        if LATE <= late < HIGHEST and (course > EVER).all():
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
    needs=(CHANCE,),
    find=find,
    advice="Look at pairs of inputs and labels. Train on ten samples: if they aren't learnt by "
    "heart, it is the network or the learning rate; if they are, labels and inputs have nothing to "
    "do with each other, or the task has a plateau at its start.",
    others=("lr_too_low", "vanishing_gradients", "input_constant"),
    explains=("dead_units",),
    sources=("Zhang et al. (2017), arXiv:1611.03530: networks fit random labels",),
)
