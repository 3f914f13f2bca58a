"""Batches with the same samples several times."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.numbers import median, ratio
from gradlens.diagnosis.rule import Rule, Sign, below

DISTINCT = 0.5
"""Share of a batch's rows that differ: measured 1 in healthy runs, and at most 0.08 in faulty
ones."""
FEWEST = 4
"""Samples of a batch; of smaller ones, nothing is said."""


def find(evidence: Evidence) -> Iterator[Sign]:
    samples = evidence.column("samples")
    shares = np.where(samples >= FEWEST, ratio(evidence.column("distinct_rows"), samples), np.nan)
    found = median(shares)
    if found < DISTINCT:
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
