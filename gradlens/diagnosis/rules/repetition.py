"""The same batch at every step, or the same samples in a batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.numbers import largest, median, ratio, share
from gradlens.diagnosis.rule import Rule, Sign, above, below

SHARE, OFTEN = 0.5, 0.85
"""Share of the pairs of consecutive steps that have the same batch. Up to the second, some steps
with each batch are on purpose, as those of a policy with each of its rollouts: a notice."""
GAP = 1.5
"""The late validation loss over that of training. Where all steps have the same batch, it may be
the whole data set, and it is a notice unless this is a sign of harm."""
FEWEST = 8
"""Pairs of consecutive steps; with fewer, nothing is said."""


def repeated(evidence: Evidence) -> Iterator[Sign]:
    sums = evidence.column("checksum")
    known = np.isfinite(sums[1:]) & np.isfinite(sums[:-1]) & (np.diff(evidence.steps) == 1)
    same = known & (sums[1:] == sums[:-1])
    found = share(same, known)
    if known.sum() >= FEWEST and found > SHARE:
        numbers = (above("share of steps with the batch of the step before", found, SHARE),)
        has_gap = bool(evidence.valid_loss.steps.size) and _gap(evidence) > GAP
        does_harm = OFTEN < found < 1 or has_gap
        step = int(evidence.steps[1:][same][0])
        yield Sign(step, numbers, is_alarm=does_harm, advice="" if does_harm else WHOLE)


def _gap(evidence: Evidence) -> float:
    """The late validation loss over the late training loss."""
    valid = evidence.valid_loss
    return median(valid.values[evidence.is_late(valid.steps)]) / evidence.late_loss


WHOLE = (
    "If it is the whole data set, nothing is wrong; otherwise, make the loader's iterator once for "
    "each epoch, since next(iter(loader)) restarts it."
)

DISTINCT = 0.5
"""Share of a batch's rows that differ: measured 1 in healthy runs, and at most 0.08 in faulty
ones."""
FEW_STATES, FEWEST_STEPS = 1.0, 4
"""The different sizes of the batches' median rows, over the distinct rows of a batch: where there
are no more, batches have the same few rows, as of a small space of states or a small data set, and
these are all that there are. With fewer different sizes than the second, nothing is said."""
SMALLEST = 4
"""Samples of a batch; of smaller ones, nothing is said."""


def duplicated(evidence: Evidence) -> Iterator[Sign]:
    samples = evidence.column("samples")
    shares = np.where(samples >= SMALLEST, ratio(evidence.column("distinct_rows"), samples), np.nan)
    found = median(shares)
    sizes = np.unique(evidence.column("row_rms_median"))
    few = FEW_STATES * largest(evidence.column("distinct_rows"))
    if found < DISTINCT and np.isfinite(sizes).sum() > max(few, FEWEST_STEPS):
        numbers = (below("share of a batch's samples that differ", found, DISTINCT),)
        yield Sign(int(evidence.steps[shares < DISTINCT][0]), numbers)


RULES = (
    Rule(
        fault="batch_repeated",
        title="Every step has the same batch",
        needs=(INPUTS,),
        find=repeated,
        advice="Make the loader's iterator once for each epoch: next(iter(loader)) restarts it. "
        "If you train on one batch on purpose, as a test or because it is the whole data set, "
        "nothing is wrong.",
        explains=("class_imbalance", "data_order", "overfitting", "label_noise"),
    ),
    Rule(
        fault="samples_duplicated",
        title="Batches have the same samples several times",
        needs=(INPUTS,),
        find=duplicated,
        advice="Look at the sampler and the dataset: indices may be repeated.",
        explains=("overfitting",),
    ),
)
