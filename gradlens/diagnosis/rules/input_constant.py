"""All samples of a batch are the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import is_stuck, starts_late
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.numbers import median, share
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, below

SPREAD = 0.02
"""The rms of the samples' difference from their mean, over that of the samples: 0.3 and more of
images, and in single precision about 1e-4 where samples are equal."""
SMALL = 0.05
"""The same without the division: of inputs that are so small, layers with biases learn little. It
is a notice if learning begins early nevertheless, as of normalised rows with many elements."""
SHARE = 0.9
"""Share of the steps whose inputs are so similar."""


def find(evidence: Evidence) -> Iterator[Sign]:
    spread = np.where(evidence.column("input_rms") == 0, 0, evidence.column("input_spread"))
    known = np.isfinite(spread) & (evidence.column("samples") > 1)
    if share(spread < SPREAD, known) > SHARE:
        numbers = (below("spread of the samples, over their size", median(spread[known]), SPREAD),)
        yield Sign(int(evidence.steps[known][0]), numbers)
        return
    size = spread * evidence.column("input_rms")
    is_real = evidence.setup.input_kind != "integers" and not evidence.setup.input_normalised
    if is_real and share(size < SMALL, known) > SHARE:
        numbers = (below("spread of the samples", median(size[known]), SMALL),)
        step = int(evidence.steps[known][0])
        does_harm = is_stuck(evidence) or starts_late(evidence)
        title = "Inputs hardly differ between samples"
        yield Sign(step, numbers, "very likely", does_harm, title=title)


RULE = Rule(
    fault="input_constant",
    title="All samples of a batch have the same input",
    needs=(INPUTS,),
    find=find,
    advice="Look at what the loader returns: the inputs have no information about the targets.",
    explains=(
        "samples_duplicated",
        "batch_repeated",
        "input_offset",
        "dead_units",
        "symmetric_init",
        "no_gradient",
        *NO_PROGRESS,
    ),
)
