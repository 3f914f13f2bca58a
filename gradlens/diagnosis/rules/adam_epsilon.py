"""Adam's epsilon is larger than what it divides by."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import OPTIMIZER
from gradlens.diagnosis.numbers import median, medians, ratio, share
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, above, below

TIMES = 1.0
"""Epsilon over the median of √v: measured at most 1e-3 in healthy runs, and 300 to 7e4 in faulty
ones."""
USUAL = 1e-6
"""Below this, epsilon isn't what is wrong if gradients are even smaller."""
SHARE = 0.5
"""Share of the recorded steps."""
SMALLEST = 2.98e-8
"""Numbers below are 0 in float16, so that Adam divides by zero where a gradient has been 0."""
IN_HALF = (
    "Keep the weights in float32 and use torch.autocast, or use eps=1e-4: in float16, numbers "
    "below 3e-8 are 0, and Adam divides 0 by 0."
)


def find(evidence: Evidence) -> Iterator[Sign]:
    if not evidence.loss.steps.size:
        return
    epsilon = evidence.option("eps")
    moments = evidence.by_name("root_second_moment")
    names = tuple(name for name in evidence.trained if name in moments.values)
    if epsilon < SMALLEST and "float16" in evidence.setup.dtypes:
        number = below("epsilon, which is 0 in float16", epsilon, SMALLEST)
        step = int(evidence.loss.steps[0])
        yield Sign(step, (number,), title="Adam's epsilon is 0 in float16", advice=IN_HALF)
        return
    if not epsilon > USUAL or not names:
        return
    typical = medians(moments.matrix(names))
    found = ratio(np.full(len(typical), epsilon), typical)
    known = np.isfinite(found)
    if share(found > TIMES, known) > SHARE:
        numbers = (above("epsilon over the median of the root of v", median(found), TIMES),)
        yield Sign(int(moments.steps[known][0]), numbers)


RULE = Rule(
    fault="adam_epsilon",
    title="Adam's epsilon is larger than the root of its second moments",
    needs=(OPTIMIZER,),
    find=find,
    advice="Use eps=1e-8, which is the default. With a large epsilon, Adam is gradient descent "
    "with a very small learning rate.",
    others=("lr_too_low",),
    explains=("nonfinite_weights", "nonfinite_loss", "lr_too_high", *NO_PROGRESS),
)
