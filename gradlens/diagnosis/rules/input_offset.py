"""Inputs whose mean is much larger than their deviation from it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import is_high, is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.numbers import median, ratio
from gradlens.diagnosis.rule import Rule, Sign, above
from gradlens.diagnosis.rules.input_scale import HARMLESS

LARGE, LARGEST = 3.5, 6.0
"""The mean over the standard deviation: measured at most 3.1 in healthy runs (inputs in 0 to 1),
and 30 in faulty ones. In between, it is a notice unless training is unstable or learns nothing."""


def find(evidence: Evidence) -> Iterator[Sign]:
    offsets = ratio(np.abs(evidence.column("input_mean")), evidence.column("input_std"))
    found = median(offsets)
    if evidence.setup.input_kind != "integers" and found > LARGE:
        is_normalised = evidence.setup.input_normalised
        does_harm = found > LARGEST or is_high(evidence) or is_stuck(evidence)
        yield Sign(
            int(evidence.steps[np.isfinite(offsets)][0]),
            (above("mean of the inputs over their standard deviation", found, LARGE),),
            is_alarm=does_harm and not is_normalised,
            advice=HARMLESS if is_normalised else "",
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
        "clipping_always",
        "exploding_gradients",
        "saturated_units",
        "dead_units",
        "vanishing_gradients",
        "lr_too_high",
        "lr_edge",
        "lr_too_low",
        "labels_random",
    ),
    sources=("LeCun et al. (1998), Efficient BackProp, Sec. 4.3",),
)
