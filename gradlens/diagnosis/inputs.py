"""Signs of inputs that should have been normalised."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import is_high, is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.numbers import median
from gradlens.diagnosis.rule import Sign, above
from gradlens.diagnosis.rules.saturated_units import find as saturated
from gradlens.history.lines import Floats

HARMLESS = "This is harmless, since the model begins with a normalisation."


def beyond(
    evidence: Evidence, name: str, values: Floats, limit: float, certain: float
) -> Iterator[Sign]:
    """A sign if the median over steps of a number ``[K]`` of the inputs is above its ``limit``.

    Up to ``certain``, it is a notice unless training is unstable, learns nothing, or has saturated
    units. It is one in any case where the model begins with a normalisation.
    """
    found = median(values)
    if evidence.setup.input_kind == "integers" or not found > limit:
        return
    is_normalised = evidence.setup.input_normalised
    does_harm = is_high(evidence) or is_stuck(evidence) or any(saturated(evidence))
    yield Sign(
        int(evidence.steps[np.isfinite(values)][0]),
        (above(name, found, limit),),
        is_alarm=(found > certain or does_harm) and not is_normalised,
        advice=HARMLESS if is_normalised else "",
    )
