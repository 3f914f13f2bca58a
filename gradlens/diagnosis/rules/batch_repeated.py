"""The same batch at every step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.numbers import median, share
from gradlens.diagnosis.rule import Rule, Sign, above

SHARE = 0.5
"""Share of the pairs of consecutive steps that have the same batch."""
GAP = 1.5
"""The late validation loss over that of training. Where all steps have the same batch, it may be
the whole data set, and it is a notice unless this is a sign of harm."""
FEWEST = 8
"""Pairs of consecutive steps; with fewer, nothing is said."""


def find(evidence: Evidence) -> Iterator[Sign]:
    sums = evidence.column("checksum")
    known = np.isfinite(sums[1:]) & np.isfinite(sums[:-1]) & (np.diff(evidence.steps) == 1)
    same = known & (sums[1:] == sums[:-1])
    found = share(same, known)
    if known.sum() >= FEWEST and found > SHARE:
        numbers = (above("share of steps with the batch of the step before", found, SHARE),)
        does_harm = found < 1 or (evidence.valid_loss.steps.size and _gap(evidence) > GAP)
        step = int(evidence.steps[1:][same][0])
        yield Sign(step, numbers, is_alarm=bool(does_harm), advice="" if does_harm else WHOLE)


def _gap(evidence: Evidence) -> float:
    """The late validation loss over the late training loss."""
    valid = evidence.valid_loss
    return median(valid.values[evidence.is_late(valid.steps)]) / evidence.late_loss


WHOLE = (
    "If it is the whole data set, nothing is wrong; otherwise, make the loader's iterator once for "
    "each epoch, since next(iter(loader)) restarts it."
)


RULE = Rule(
    fault="batch_repeated",
    title="Every step has the same batch",
    needs=(INPUTS,),
    find=find,
    advice="Make the loader's iterator once for each epoch: next(iter(loader)) restarts it. "
    "If you train on one batch on purpose, as a test or because it is the whole data set, nothing "
    "is wrong.",
    explains=("class_imbalance", "data_order", "overfitting", "label_noise"),
)
