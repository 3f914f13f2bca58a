"""Inputs that should have been normalised: they are large, or far from zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import is_high, is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.numbers import median, ratio
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above
from gradlens.diagnosis.rules.inactive_units import saturated
from gradlens.history.lines import Floats

LEARNT = 0.25
"""The late loss over that by chance, of a network that learns in spite of its inputs."""
HARMLESS = "This is harmless, since the model begins with a normalisation."


def beyond(
    evidence: Evidence, name: str, values: Floats, limit: float, certain: float
) -> Iterator[Sign]:
    """A sign if the median over steps of a number ``[K]`` of the inputs is above its ``limit``.

    Up to ``certain``, it is a notice unless training is unstable, learns nothing, or has saturated
    units. So it is where training goes well, and in any case where the model begins with a
    normalisation.
    """
    found = median(values)
    if evidence.setup.input_kind == "integers" or not found > limit:
        return
    is_normalised = evidence.setup.input_normalised
    does_harm = is_high(evidence) or is_stuck(evidence) or any(saturated(evidence))
    has_learnt = evidence.late_loss < LEARNT * evidence.chance
    yield Sign(
        int(evidence.steps[np.isfinite(values)][0]),
        (above(name, found, limit),),
        is_alarm=((found > certain and not has_learnt) or does_harm) and not is_normalised,
        advice=HARMLESS if is_normalised else "",
    )


FAR, FARTHEST = 3.5, 6.0
"""The mean over the standard deviation: measured at most 3.1 in healthy runs (inputs in 0 to 1),
and 30 in faulty ones. In between, it is a notice unless training is unstable or learns nothing."""


def offset(evidence: Evidence) -> Iterator[Sign]:
    offsets = ratio(np.abs(evidence.column("input_mean")), evidence.column("input_std"))
    yield from beyond(
        evidence, "mean of the inputs over their standard deviation", offsets, FAR, FARTHEST
    )


LARGE, LARGEST = 5.0, 20.0
"""The rms of the inputs: measured 0.3 to 1 in healthy runs, and 110 to 140 in faulty ones. In
between, it is a notice unless training is unstable or learns nothing."""


def scale(evidence: Evidence) -> Iterator[Sign]:
    yield from beyond(
        evidence, "root mean square of the inputs", evidence.column("input_rms"), LARGE, LARGEST
    )


RULES = (
    Rule(
        fault="input_offset",
        title="Inputs are far from zero, compared with their spread",
        needs=(INPUTS,),
        find=offset,
        advice="Subtract the mean of the training set from the inputs.",
        explains=(
            "input_scale",
            "loss_sum",
            "exploding_gradients",
            *INSTABILITY,
            *NO_PROGRESS,
        ),
        sources=("LeCun et al. (1998), Efficient BackProp, Sec. 4.3",),
    ),
    Rule(
        fault="input_scale",
        title="Inputs are large",
        needs=(INPUTS,),
        find=scale,
        advice="Normalise inputs to mean 0 and variance 1; divide pixels by 255 at least.",
        explains=("loss_sum", *INSTABILITY, *NO_PROGRESS),
        sources=("LeCun et al. (1998), Efficient BackProp, Sec. 4.3",),
    ),
)
