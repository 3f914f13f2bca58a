"""Some labels are wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import CHANCE, SINGLE_LOSSES
from gradlens.diagnosis.numbers import finite, median
from gradlens.diagnosis.rule import Rule, Sign, above, below

CERTAIN, FEWEST, MOST = 0.06, 0.03, 0.3
"""Share of samples whose loss is more than 2 log C: measured at most 0.02 in healthy runs, where
samples are hard, and 0.037 to 0.06 where 10 % of the labels are wrong. Below the first of these, it
is a notice."""
MEDIAN = 0.35
"""The median sample's loss over that by chance: the network has learnt the others."""
STEPS = 40
"""A run that is shorter hasn't learnt what is easy."""


def find(evidence: Evidence) -> Iterator[Sign]:
    late = evidence.is_late(evidence.steps)
    over = finite(evidence.column("loss_over")[late])
    usual = median(evidence.column("loss_median")[late]) / evidence.chance
    found = float(over.mean()) if over.size else float("nan")
    if evidence.length >= STEPS and usual < MEDIAN and FEWEST <= found <= MOST:
        is_alarm = found >= CERTAIN
        limit = CERTAIN if is_alarm else FEWEST
        numbers = (
            above("share of samples whose loss is above 2 log C", found, limit),
            below("loss of the median sample, over that by chance", usual, MEDIAN),
        )
        with np.errstate(invalid="ignore"):
            known = evidence.column("loss_median") < MEDIAN * evidence.chance
        yield Sign(int(evidence.steps[known][0]), numbers, "consistent with", is_alarm)


RULE = Rule(
    fault="label_noise",
    title="Some samples have a very high loss while most are learnt",
    needs=(CHANCE, SINGLE_LOSSES),
    find=find,
    advice="Look at these samples: their labels may be wrong, or they are hard.",
    others=("outlier_sample", "overfitting"),
)
