"""Labels of which most are of one class, or padding, or that the network gets as its input."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import LONG_ENOUGH
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import DENSE_LABELS, LABELS
from gradlens.diagnosis.numbers import first, mean, median
from gradlens.diagnosis.rule import Rule, Sign, above, beyond, shown
from gradlens.history.finding import Certainty

PADDING = 0.1
"""Share of the labels that are padding."""


def padding(evidence: Evidence) -> Iterator[Sign]:
    found = evidence.by_name("dense_labels")
    share = median(found.matrix(("padding",)))
    number = above("share of the labels that are padding", share, PADDING)
    yield from shown(Sign(int(found.steps[:1].sum()), (number,), "very likely"))


TIMES = 5.0
"""The most frequent class over the median one: measured at most 1.7 in healthy runs, and 21 to 96
in faulty ones."""
FEWEST, FEWEST_PER_CLASS = 300, 20
"""Labels: counts of fewer labels differ too much at random. Classes that were never seen don't
count: networks may have more outputs than the data have classes."""
DENSE = 0.97
"""Share of the most frequent class among the labels of pixels or words."""
LEARNT = 0.9
"""The late loss over the entropy of the labels, which is the loss of a constant prediction: below,
the network tells samples apart in spite of the imbalance, and it is a notice."""


def imbalance(evidence: Evidence) -> Iterator[Sign]:
    counts = evidence.labels
    seen = float(counts.sum())
    if not counts.size:
        yield from _of_dense_labels(evidence)
    elif seen >= max(FEWEST, FEWEST_PER_CLASS * len(counts)):
        # Of two classes, the median one is the other.
        others = [0.0] if len(counts) == 1 else counts[1:] if len(counts) == 2 else counts
        found = float(counts[0]) / max(float(np.median(others)), 1.0)
        if found > TIMES:
            name = "labels of the most frequent class, over those of the median one"
            table = evidence.by_name("labels")
            seen_by = np.nansum(table.matrix(tuple(table.values)), axis=0)
            step, numbers = int(table.steps[seen_by >= FEWEST][0]), (above(name, found, TIMES),)
            if len(counts) == 1:
                yield Sign(step, numbers, is_alarm=False, title=ONE_CLASS, advice=PLACES)
                return
            has_learnt = _has_learnt(evidence, evidence.label_entropy)
            is_early = evidence.length < 2 * LONG_ENOUGH  # rare labels are learnt late
            is_harmless = evidence.setup.loss_weighted or has_learnt or is_early
            yield Sign(step, numbers, is_alarm=not is_harmless)


def _has_learnt(evidence: Evidence, entropy: float) -> bool:
    """Whether the loss is lower than that of a constant prediction, on average over late steps."""
    return mean(evidence.loss.values[evidence.is_late(evidence.loss.steps)]) < LEARNT * entropy


def _of_dense_labels(evidence: Evidence) -> Iterator[Sign]:
    found = evidence.by_name("dense_labels")
    share = median(found.matrix(("most",)))
    if share > DENSE:
        numbers = (above("share of the most frequent class", share, DENSE),)
        entropy = -share * math.log(share) - (1 - share) * math.log1p(-share) if share < 1 else 0.0
        is_alarm = not _has_learnt(evidence, entropy)
        yield Sign(int(found.steps[0]), numbers, "very likely", is_alarm, title=OF_DENSE_LABELS)


OF_DENSE_LABELS = "One class has most pixels or words"
ONE_CLASS = "All labels are of one class"
PLACES = (
    "Look at where labels come from: a classifier needs those of all classes. For the generator of "
    "an adversarial pair, and where the label is the place of a positive among negatives, this is "
    "as it should be."
)


ALL = 0.99
"""Share of the labels that are the tokens which the network gets."""
SEEN = 0.5
"""Share of the places that attention lets see the next one. A causal mask leaves none."""
REVERSE = "_reverse"
"""The end of the names of a recurrent layer's weights for the other direction."""


def seen(evidence: Evidence) -> Iterator[Sign]:
    """Labels of a text that are the tokens in their place, or the next ones where these are seen.

    An autoencoder's labels are its own tokens on purpose, but then no attention is causal.
    """
    here, later, attends = (
        median(evidence.column(name)) for name in ("labels_here", "labels_next", "next_seen")
    )
    place = first(np.isfinite(evidence.column("labels_here")))
    if place is None or (here > ALL and later > ALL):  # texts of one token
        return
    step = int(evidence.steps[place])
    is_both = any(REVERSE in name for name in evidence.history.parameters)
    if here > ALL:
        number = above("share of the labels that are the token in their place", here, ALL)
        yield Sign(step, (number,), is_alarm=attends == 0)
    elif later > ALL and (attends > SEEN or is_both):
        numbers = beyond(
            above("share of the labels that are the next token", later, ALL),
            above("share of places that attention lets see it", attends, SEEN),
        )
        certainty: Certainty = "fact" if attends > SEEN else "very likely"
        yield Sign(step, numbers, certainty, title=AHEAD, advice=MASK)


AHEAD = "The network sees the next token, which it has to predict"
MASK = (
    "Pass a causal mask, or is_causal=True, to attention, and use recurrent layers of one "
    "direction: otherwise the loss falls since the network copies, and it can't continue a text."
)

RULES = (
    Rule("target_seen",
         "The labels of the loss are the tokens that the network gets in the same places",
         needs=(LABELS,), find=seen, explains=("overfitting",),
         advice="Shift the labels: outputs[:, :-1] predict tokens[:, 1:]. Of an autoencoder, "
                "which has to get its tokens through a code, nothing is wrong."),
    Rule("padding_in_loss",
         "The loss counts padding: many rows of labels end in one label that is nowhere else",
         needs=(DENSE_LABELS,), find=padding, explains=("class_imbalance",),
         advice="Pass ignore_index to the cross-entropy, which is the label of padding, or "
                "multiply the losses by a mask before their mean."),
    Rule("class_imbalance", "One class has most of the labels",
         needs=(LABELS,), find=imbalance, others=("data_order",),
         explains=("constant_output", "labels_random"),
         advice="Judge by a measure other than accuracy: a constant prediction is right most of "
                "the time. Weights of classes in the loss, or resampling, give the rare ones "
                "more influence."),
)  # fmt: skip
