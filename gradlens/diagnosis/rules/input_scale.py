"""Inputs that are much larger than one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import is_high, is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.rule import Rule, Sign, above

LARGE, LARGEST = 5.0, 20.0
"""Measured 0.3 to 1 in healthy runs, and 110 to 140 in faulty ones. In between, it is a notice
unless training is unstable or learns nothing."""


def find(evidence: Evidence) -> Iterator[Sign]:
    found = evidence.typical("input_rms")
    if evidence.setup.input_kind != "integers" and found > LARGE:
        is_normalised = evidence.setup.input_normalised
        known = np.isfinite(evidence.column("input_rms"))
        does_harm = found > LARGEST or is_high(evidence) or is_stuck(evidence)
        yield Sign(
            int(evidence.steps[known][0]),
            (above("root mean square of the inputs", found, LARGE),),
            is_alarm=does_harm and not is_normalised,
            advice=HARMLESS if is_normalised else "",
        )


HARMLESS = "This is harmless, since the model begins with a normalisation."

RULE = Rule(
    fault="input_scale",
    title="Inputs are large",
    needs=(INPUTS,),
    find=find,
    advice="Normalise inputs to mean 0 and variance 1; divide pixels by 255 at least.",
    explains=(
        "loss_sum",
        "clipping_always",
        "exploding_gradients",
        "saturated_units",
        "dead_units",
        "vanishing_gradients",
        "corrupt_batch",
        "lr_too_high",
        "lr_edge",
        "lr_too_low",
        "labels_random",
    ),
    sources=("LeCun et al. (1998), Efficient BackProp, Sec. 4.3",),
)
