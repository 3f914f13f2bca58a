"""The optimizer is made anew at each step, and forgets what it has averaged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import OPTIMIZER, UPDATES
from gradlens.diagnosis.numbers import median
from gradlens.diagnosis.rule import Rule, Sign, above
from gradlens.diagnosis.rules.unchanged import changes

WITH_STATE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "SGD")
"""Classes of torch.optim whose state is empty until their first step; SGD's needs a momentum."""
MOST = 0.5
"""Share of the steps after an update at which there is no state; it can't be empty in others."""
FEWEST = 5
"""Steps after an update. A loop may begin some rounds with a new optimizer on purpose."""
ROUNDS, AROUND, RISES = 3, 3, 1.2
"""Rounds that begin with an empty state, and the median loss of so many steps from there on over
that before: above, the weights are made anew as well."""


def find(evidence: Evidence) -> Iterator[Sign]:
    if evidence.setup.optimizer not in WITH_STATE:
        return
    if evidence.setup.optimizer == "SGD" and not evidence.option("momentum") > 0:
        return
    if not any(changes(evidence, name) for name in evidence.by_name("weight_rms").values):
        return  # of parameters that had no gradient at its steps, an optimizer has no state
    is_after = np.append(False, evidence.column("updates")[:-1] > 0)
    is_empty = is_after & (evidence.column("stateless") > 0)
    share = is_empty.sum() / max(is_after.sum(), 1)
    if is_after.sum() >= FEWEST and share > MOST:
        numbers = (above("share of the steps that begin with an empty state", share, MOST),)
        yield Sign(int(evidence.steps[is_empty][0]), numbers)
    elif is_empty.sum() >= ROUNDS:
        losses, places = evidence.column("loss"), np.flatnonzero(is_empty)
        rises = [median(losses[n : n + AROUND]) / median(losses[n - AROUND : n]) for n in places]
        number = above("loss when the state is empty, over that before", median(rises), RISES)
        rounds = above("rounds that begin with an empty state", len(places), ROUNDS - 1)
        is_alarm = median(rises) > RISES
        found = (rounds, number) if is_alarm else (rounds,)
        yield Sign(int(evidence.steps[is_empty][0]), found, is_alarm=is_alarm, title=ROUND)


ROUND = "The optimizer is made anew again and again, and forgets what it has averaged"

RULE = Rule(
    fault="optimizer_anew",
    title="The optimizer is made anew at each step",
    needs=(OPTIMIZER, UPDATES),
    find=find,
    advice="Make the optimizer once, before the loop. A new one has no momentum, and each of its "
    "steps is the first one: Adam's then has the same size for all gradients.",
    explains=("outlier_sample", "corrupt_batch", "lr_edge", "labels_random"),
)
