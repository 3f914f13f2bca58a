"""The optimizer makes no step, or steps of size zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import UPDATES
from gradlens.diagnosis.numbers import largest
from gradlens.diagnosis.rule import Rule, Sign, below

FEWEST = 10
"""Steps without an update; more than micro-batches usually have."""


def find(evidence: Evidence) -> Iterator[Sign]:
    updates = evidence.column("updates")
    known = np.isfinite(updates)
    if known.sum() < FEWEST:
        return
    start = int(evidence.steps[known][0])
    if largest(updates) == 0:
        yield Sign(start, (below("optimizer steps, of all steps so far", 0.0, 1.0),))
    elif largest(evidence.column("lr")) == 0:
        yield Sign(
            start,
            (below("largest learning rate so far", 0.0, 1e-30),),
            title="The learning rate is zero",
            advice="Set the learning rate, or look at the schedule that has set it to zero.",
        )


RULE = Rule(
    fault="no_step",
    title="The optimizer has made no step",
    needs=(UPDATES,),
    find=find,
    advice="Call optimizer.step() after backward, on the optimizer that has the model's "
    "parameters. A GradScaler skips steps as long as gradients are not finite.",
    explains=("symmetric_init", "dead_units", "lr_too_low", "labels_random"),
)
