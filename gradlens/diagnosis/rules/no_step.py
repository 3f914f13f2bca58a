"""The optimizer makes no step, or steps of size zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import UPDATES
from gradlens.diagnosis.numbers import Truths
from gradlens.diagnosis.rule import Rule, Sign, above

FEWEST = 10
"""Steps without an update; more than micro-batches usually have."""
SHARE = 0.1
"""Share of the run that has no update at its end."""


def find(evidence: Evidence) -> Iterator[Sign]:
    updates, rates = evidence.column("updates"), evidence.column("lr")
    known = np.isfinite(updates)
    steps = evidence.steps[known]
    for name, idle, title, advice in (
        ("steps in a row without one of the optimizer", updates[known] == 0, "", ""),
        ("steps in a row with a learning rate of zero", rates[known] == 0, NO_RATE, SET_RATE),
    ):
        count = _at_the_end(idle)
        if count >= max(FEWEST, SHARE * len(steps)):
            numbers = (above(name, count, FEWEST - 1),)
            yield Sign(int(steps[-count]), numbers, title=title, advice=advice)
            return


def _at_the_end(holds: Truths) -> int:
    """The number of places up to the last one at which it holds without a gap."""
    return int(np.argmin(np.append(holds[::-1], False)))


NO_RATE = "The learning rate is zero"
SET_RATE = "Set the learning rate, or look at the schedule that has set it to zero."

RULE = Rule(
    fault="no_step",
    title="The optimizer makes no step",
    needs=(UPDATES,),
    find=find,
    advice="Call optimizer.step() after backward, on the optimizer that has the model's "
    "parameters. A GradScaler skips steps as long as gradients are not finite.",
    explains=("symmetric_init", "dead_units", "lr_too_low", "labels_random"),
)
