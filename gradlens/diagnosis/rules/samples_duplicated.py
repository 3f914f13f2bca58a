"""Batches with the same samples several times."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.numbers import largest, median, ratio
from gradlens.diagnosis.rule import Rule, Sign, below

DISTINCT = 0.5
"""Share of a batch's rows that differ: measured 1 in healthy runs, and at most 0.08 in faulty
ones."""
FEW_STATES, FEWEST_STEPS = 1.0, 4
"""The different sizes of the batches' median rows, over the distinct rows of a batch: where there
are no more, batches have the same few rows, as of a small space of states or a small data set, and
these are all that there are. With fewer different sizes than the second, nothing is said."""
FEWEST = 4
"""Samples of a batch; of smaller ones, nothing is said."""


def find(evidence: Evidence) -> Iterator[Sign]:
    samples = evidence.column("samples")
    shares = np.where(samples >= FEWEST, ratio(evidence.column("distinct_rows"), samples), np.nan)
    found = median(shares)
    sizes = np.unique(evidence.column("row_rms_median"))
    few = FEW_STATES * largest(evidence.column("distinct_rows"))
    if found < DISTINCT and np.isfinite(sizes).sum() > max(few, FEWEST_STEPS):
        numbers = (below("share of a batch's samples that differ", found, DISTINCT),)
        yield Sign(int(evidence.steps[shares < DISTINCT][0]), numbers)


RULE = Rule(
    fault="samples_duplicated",
    title="Batches have the same samples several times",
    needs=(INPUTS,),
    find=find,
    advice="Look at the sampler and the dataset: indices may be repeated.",
    explains=("overfitting",),
)
