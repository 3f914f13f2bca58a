"""Inputs that are much larger than one."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.inputs import beyond
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign

LARGE, LARGEST = 5.0, 20.0
"""The rms of the inputs: measured 0.3 to 1 in healthy runs, and 110 to 140 in faulty ones. In
between, it is a notice unless training is unstable or learns nothing."""


def find(evidence: Evidence) -> Iterator[Sign]:
    yield from beyond(
        evidence, "root mean square of the inputs", evidence.column("input_rms"), LARGE, LARGEST
    )


RULE = Rule(
    fault="input_scale",
    title="Inputs are large",
    needs=(INPUTS,),
    find=find,
    advice="Normalise inputs to mean 0 and variance 1; divide pixels by 255 at least.",
    explains=("loss_sum", *INSTABILITY, *NO_PROGRESS),
    sources=("LeCun et al. (1998), Efficient BackProp, Sec. 4.3",),
)
