"""A loss that needs log-probabilities gets other scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import GRAPH, SINGLE_LOSSES
from gradlens.diagnosis.numbers import share
from gradlens.diagnosis.rule import Rule, Sign, above

NEGATIVE = -1e-3
"""A negative logarithm of a probability is at least 0, but for rounding."""
MOST = 0.1
"""Share of the steps at which the median sample's is below."""


def find(evidence: Evidence) -> Iterator[Sign]:
    medians = evidence.column("loss_median")
    known = np.isfinite(medians)
    with np.errstate(invalid="ignore"):
        is_negative = medians < NEGATIVE
    found = share(is_negative, known)
    if evidence.setup.loss.startswith("NllLoss") and found > MOST:
        name = "share of the steps at which the median sample's loss is negative"
        yield Sign(int(evidence.steps[is_negative][0]), (above(name, found, MOST),))


RULE = Rule(
    fault="loss_of_scores",
    title="The loss needs log-probabilities, and gets other numbers",
    needs=(GRAPH, SINGLE_LOSSES),
    find=find,
    advice="Use CrossEntropyLoss on the scores of the last layer, without a softmax. NLLLoss needs "
    "a log_softmax before it; without one, it falls below zero however bad the predictions are.",
    explains=("lr_too_high", "lr_edge", "exploding_gradients", "saturated_units", "labels_random"),
)
