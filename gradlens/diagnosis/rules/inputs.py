"""Inputs that hardly differ, are large, or are far from zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import is_high, is_stuck, starts_late
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS
from gradlens.diagnosis.numbers import median, ratio, share
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above, below
from gradlens.diagnosis.rules.inactive_units import saturated
from gradlens.history.lines import Floats

SPREAD = 0.02
"""The rms of the samples' difference from their mean, over that of the samples: 0.3 and more of
images, and in single precision about 1e-4 where samples are equal."""
SMALL = 0.05
"""The same without the division: of inputs that are so small, layers with biases learn little. It
is a notice if learning begins early nevertheless, as of normalised rows with many elements."""
SHARE = 0.9
"""Share of the steps whose inputs are so similar."""


def constant(evidence: Evidence) -> Iterator[Sign]:
    spread = np.where(evidence.column("input_rms") == 0, 0, evidence.column("input_spread"))
    known = np.isfinite(spread) & (evidence.column("samples") > 1)
    step = int(evidence.steps[known][0]) if known.any() else 0
    if share(spread < SPREAD, known) > SHARE:
        number = below("spread of the samples, over their size", median(spread[known]), SPREAD)
        yield Sign(step, (number,))
        return
    size = spread * evidence.column("input_rms")
    is_real = evidence.setup.input_kind != "integers" and not evidence.setup.input_normalised
    if is_real and share(size < SMALL, known) > SHARE:
        number = below("spread of the samples", median(size[known]), SMALL)
        does_harm = is_stuck(evidence) or starts_late(evidence)
        yield Sign(step, (number,), "very likely", does_harm, title=SIMILAR)


SIMILAR = "Inputs hardly differ between samples"
LEARNT = 0.25
"""The late loss over that without learning, of a network that learns in spite of its inputs."""
HARMLESS = "This is harmless, since the model begins with a normalisation."


FAR = 3.5, 6.0
"""The mean over the standard deviation: measured at most 3.1 in healthy runs (inputs in 0 to 1),
and 30 in faulty ones. In between, it is a notice unless training is unstable or learns nothing."""
LARGE = 5.0, 20.0
"""The rms of the inputs: measured 0.3 to 1 in healthy runs, and 110 to 140 in faulty ones. In
between, it is a notice unless training is unstable or learns nothing."""


def offset(evidence: Evidence) -> Iterator[Sign]:
    offsets = ratio(np.abs(evidence.column("input_mean")), evidence.column("input_std"))
    yield from _beyond(evidence, "mean of the inputs over their standard deviation", offsets, FAR)


def scale(evidence: Evidence) -> Iterator[Sign]:
    sizes = evidence.column("input_rms")
    yield from _beyond(evidence, "root mean square of the inputs", sizes, LARGE)


def _beyond(
    evidence: Evidence, name: str, values: Floats, limits: tuple[float, float]
) -> Iterator[Sign]:
    """A sign if the median over steps of a number ``[K]`` of the inputs is above the first limit.

    Up to the second one, it is a notice unless training is unstable, learns nothing, or has
    saturated units. So it is in any case where the network learns nevertheless, or begins with a
    normalisation.
    """
    (limit, certain), is_normalised = limits, evidence.setup.input_normalised
    found = median(values)
    if evidence.setup.input_kind == "integers" or not found > limit:
        return
    does_harm = is_high(evidence) or is_stuck(evidence) or any(saturated(evidence))
    is_harmless = is_normalised or evidence.progress < LEARNT
    yield Sign(
        int(evidence.steps[np.isfinite(values)][0]),
        (above(name, found, limit),),
        is_alarm=(found > certain or does_harm) and not is_harmless,
        advice=HARMLESS if is_normalised else "",
    )


RULES = (
    Rule("input_constant", "All samples of a batch have the same input",
         needs=(INPUTS,), find=constant,
         explains=("samples_duplicated", "batch_repeated", "input_offset", "dead_units",
                   "symmetric_init", "no_gradient", *NO_PROGRESS),
         advice="Look at what the loader returns: the inputs have no information about the "
                "targets."),
    Rule("input_offset", "Inputs are far from zero, compared with their spread",
         needs=(INPUTS,), find=offset,
         explains=("input_scale", "loss_sum", "exploding_gradients", *INSTABILITY, *NO_PROGRESS),
         sources=("LeCun et al. (1998), Efficient BackProp, Sec. 4.3",),
         advice="Subtract the mean of the training set from the inputs."),
    Rule("input_scale", "Inputs are large",
         needs=(INPUTS,), find=scale, explains=("loss_sum", *INSTABILITY, *NO_PROGRESS),
         sources=("LeCun et al. (1998), Efficient BackProp, Sec. 4.3",),
         advice="Normalise inputs to mean 0 and variance 1; divide pixels by 255 at least."),
)  # fmt: skip
