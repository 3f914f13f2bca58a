"""A schedule that has made the learning rate tiny for most of the run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import LONG_ENOUGH
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import RATES
from gradlens.diagnosis.rule import Rule, Sign, above, below

TINY = 1e-3
"""The learning rate over its maximum: usual schedules come that far down in their last steps."""
MOST = 0.5
"""Share of the run that it stays below, up to the end."""


def find(evidence: Evidence) -> Iterator[Sign]:
    rates = evidence.column("lr")
    known = np.isfinite(rates)
    rates, steps = rates[known], evidence.steps[known]
    low = rates < TINY * rates.max()
    first = len(low) - int(np.argmin(np.append(low[::-1], False)))
    # A rate that is zero at once was set so, and is named by another rule.
    if evidence.length >= LONG_ENOUGH and first < len(low) and rates[first] > 0:
        share = float(steps[-1] - steps[first]) / float(steps[-1] - steps[0])
        if share > MOST:
            numbers = (
                below("latest learning rate, over the largest", rates[-1] / rates.max(), TINY),
                above("share of the run below that", share, MOST),
            )
            yield Sign(int(steps[first]), numbers)


RULE = Rule(
    fault="lr_decayed",
    title="The schedule has made the learning rate tiny for most of the run",
    needs=(RATES,),
    find=find,
    advice="Call scheduler.step() once an epoch if the schedule counts epochs. Otherwise give the "
    "schedule the number of steps of the whole run.",
    explains=("no_step", "lr_too_low", "labels_random"),
)
