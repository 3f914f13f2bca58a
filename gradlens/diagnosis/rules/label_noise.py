"""Some labels are wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import CHANCE, SINGLE_LOSSES
from gradlens.diagnosis.numbers import finite, median
from gradlens.diagnosis.rule import Rule, Sign, above, below

CERTAIN, FEWEST, MOST = 0.033, 0.025, 0.3
"""Share of samples whose loss is more than 2 log C: measured at most 0.02 in healthy runs, where
samples are hard, and 0.034 to 0.06 where 5 to 20 % of the labels are wrong. Below the first of
these, it is a notice."""
LASTS = 0.8
"""The same over that of the quarter before: hard samples become fewer while a network learns, and
wrong labels don't. Otherwise, it is a notice."""
MEDIAN = 0.5
"""The median sample's loss over that by chance: the network has learnt the others."""
STEPS = 40
"""A run that is shorter hasn't learnt what is easy."""


def find(evidence: Evidence) -> Iterator[Sign]:
    late = evidence.is_late(evidence.steps)
    over = finite(evidence.column("loss_over")[late])
    usual = median(evidence.column("loss_median")[late]) / evidence.chance
    found = float(over.mean()) if over.size else float("nan")
    if evidence.length >= STEPS and usual < MEDIAN and FEWEST <= found <= MOST:
        lasts = found >= LASTS * _before(evidence)
        is_alarm = found >= CERTAIN and lasts
        limit = CERTAIN if is_alarm else FEWEST
        numbers = (
            above("share of samples whose loss is above 2 log C", found, limit),
            below("loss of the median sample, over that by chance", usual, MEDIAN),
        )
        with np.errstate(invalid="ignore"):
            known = evidence.column("loss_median") < MEDIAN * evidence.chance
        yield Sign(int(evidence.steps[known][0]), numbers, "consistent with", is_alarm)


def _before(evidence: Evidence) -> float:
    """The share of samples in the third quarter of the run; 0 if it isn't known."""
    steps = evidence.steps
    quarter = (evidence.length + 3) // 4
    third = ~evidence.is_late(steps) & (steps >= steps[0] + 2 * quarter)
    shares = finite(evidence.column("loss_over")[third])
    return float(shares.mean()) if shares.size else 0.0


RULE = Rule(
    fault="label_noise",
    title="Some samples have a very high loss while most are learnt",
    needs=(CHANCE, SINGLE_LOSSES),
    find=find,
    advice="Look at these samples: their labels may be wrong, or they are hard.",
    others=("outlier_sample", "overfitting"),
)
