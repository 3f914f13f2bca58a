"""Inputs whose mean is much larger than their deviation from it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.inputs import beyond
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.numbers import ratio
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign

LARGE, LARGEST = 3.5, 6.0
"""The mean over the standard deviation: measured at most 3.1 in healthy runs (inputs in 0 to 1),
and 30 in faulty ones. In between, it is a notice unless training is unstable or learns nothing."""


def find(evidence: Evidence) -> Iterator[Sign]:
    offsets = ratio(np.abs(evidence.column("input_mean")), evidence.column("input_std"))
    yield from beyond(
        evidence, "mean of the inputs over their standard deviation", offsets, LARGE, LARGEST
    )


RULE = Rule(
    fault="input_offset",
    title="Inputs are far from zero, compared with their spread",
    needs=(INPUTS,),
    find=find,
    advice="Subtract the mean of the training set from the inputs.",
    explains=(
        "input_scale",
        "loss_sum",
        "exploding_gradients",
        *INSTABILITY,
        *NO_PROGRESS,
    ),
    sources=("LeCun et al. (1998), Efficient BackProp, Sec. 4.3",),
)
