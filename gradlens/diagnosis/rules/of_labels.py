"""Labels of which most are of one class, or padding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import DENSE_LABELS, LABELS
from gradlens.diagnosis.numbers import median
from gradlens.diagnosis.rule import Rule, Sign, above

PADDING = 0.1
"""Share of the labels that are padding."""


def padding(evidence: Evidence) -> Iterator[Sign]:
    found = evidence.by_name("dense_labels")
    share = median(found.matrix(("padding",)))
    if share > PADDING:
        numbers = (above("share of the labels that are padding", share, PADDING),)
        yield Sign(int(found.steps[0]), numbers, "very likely")


TIMES = 5.0
"""The most frequent class over the median one: measured at most 1.7 in healthy runs, and 21 to 96
in faulty ones."""
FEWEST, FEWEST_PER_CLASS = 300, 20
"""Labels: counts of fewer labels differ too much at random. Classes that were never seen don't
count: networks may have more outputs than the data have classes."""


DENSE = 0.97
"""Share of the most frequent class among the labels of pixels or words."""
LEARNT = 0.8
"""The late loss over the entropy of such labels: a constant prediction has 1, at least if there are
two classes. Below, it is a notice."""


def imbalance(evidence: Evidence) -> Iterator[Sign]:
    counts = evidence.labels
    if not counts.size:
        yield from _of_dense_labels(evidence)
        return
    seen = float(counts.sum())
    if seen < max(FEWEST, FEWEST_PER_CLASS * len(counts)):
        return
    others = {1: 0.0, 2: float(counts[-1])}.get(len(counts), float(np.median(counts)))
    found = float(counts[0]) / max(others, 1.0)
    if found > TIMES:
        name = "labels of the most frequent class, over those of the median one"
        is_weighted, is_single = evidence.setup.loss_weighted, len(counts) == 1
        is_generator = is_single and evidence.setup.loss.startswith("BinaryCrossEntropy")
        yield Sign(
            _first_step(evidence),
            (above(name, found, TIMES),),
            is_alarm=not (is_generator if is_single else is_weighted),
            title="All labels are of one class" if is_single else "",
            advice=GENERATOR if is_generator else WEIGHTED if is_weighted else "",
        )


def _of_dense_labels(evidence: Evidence) -> Iterator[Sign]:
    found = evidence.by_name("dense_labels")
    share = median(found.matrix(("most",)))
    if share > DENSE:
        numbers = (above("share of the most frequent class", share, DENSE),)
        entropy = -share * math.log(share) - (1 - share) * math.log1p(-share) if share < 1 else 0.0
        is_alarm = not evidence.late_loss < LEARNT * entropy
        yield Sign(int(found.steps[0]), numbers, "very likely", is_alarm, title=OF_DENSE_LABELS)


OF_DENSE_LABELS = "One class has most pixels or words"


GENERATOR = (
    "This is as it should be for the generator of an adversarial pair. A classifier needs labels "
    "of both classes."
)
WEIGHTED = (
    "The loss has weights already. Judge by a measure other than accuracy: a constant prediction "
    "is right most of the time."
)


def _first_step(evidence: Evidence) -> int:
    """The first step by which enough labels had been seen."""
    counts = evidence.by_name("labels")
    seen = np.nansum(counts.matrix(tuple(counts.values)), axis=0)
    return int(counts.steps[seen >= FEWEST][0])


RULES = (
    Rule(
        fault="padding_in_loss",
        title="The loss counts padding: many rows of labels end in one label that is nowhere else",
        needs=(DENSE_LABELS,),
        find=padding,
        advice="Pass ignore_index to the cross-entropy, which is the label of padding, or multiply "
        "the losses by a mask before their mean.",
        explains=("class_imbalance",),
    ),
    Rule(
        fault="class_imbalance",
        title="One class has most of the labels",
        needs=(LABELS,),
        find=imbalance,
        advice="Weight the loss by class, resample, or judge by a measure other than accuracy: a "
        "constant prediction is right most of the time.",
        others=("data_order",),
    ),
)
