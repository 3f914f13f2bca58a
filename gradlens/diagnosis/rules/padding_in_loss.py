"""The loss counts the padding at the ends of sequences."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import DENSE_LABELS
from gradlens.diagnosis.numbers import median
from gradlens.diagnosis.rule import Rule, Sign, above

MOST = 0.1
"""Share of the labels that are padding."""


def find(evidence: Evidence) -> Iterator[Sign]:
    found = evidence.by_name("dense_labels")
    share = median(found.matrix(("padding",)))
    if share > MOST:
        numbers = (above("share of the labels that are padding", share, MOST),)
        yield Sign(int(found.steps[0]), numbers, "very likely")


RULE = Rule(
    fault="padding_in_loss",
    title="The loss counts padding: many rows of labels end in one label that is nowhere else",
    needs=(DENSE_LABELS,),
    find=find,
    advice="Pass ignore_index to the cross-entropy, which is the label of padding, or multiply the "
    "losses by a mask before their mean.",
    explains=("class_imbalance",),
)
