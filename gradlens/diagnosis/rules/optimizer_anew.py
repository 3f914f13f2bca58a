"""The optimizer is made anew at each step, and forgets what it has averaged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import OPTIMIZER, UPDATES
from gradlens.diagnosis.rule import Rule, Sign, above

WITH_STATE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "SGD")
"""Classes of torch.optim whose state is empty until their first step; SGD's needs a momentum."""
MOST = 0.5
"""Share of the steps after an update at which there is no state; it can't be empty in others."""
FEWEST = 5
"""Steps after an update. A loop may begin some rounds with a new optimizer on purpose."""


def find(evidence: Evidence) -> Iterator[Sign]:
    if evidence.setup.optimizer not in WITH_STATE:
        return
    if evidence.setup.optimizer == "SGD" and not evidence.option("momentum") > 0:
        return
    if not any((found > 0).any() for found in evidence.by_name("gradient_rms").values.values()):
        return  # of parameters without a gradient, an optimizer has no state
    is_after = np.append(False, evidence.column("updates")[:-1] > 0)
    is_empty = is_after & (evidence.column("stateless") > 0)
    if is_after.sum() >= FEWEST and is_empty.sum() > MOST * is_after.sum():
        share = is_empty.sum() / is_after.sum()
        numbers = (above("share of the steps that begin with an empty state", share, MOST),)
        yield Sign(int(evidence.steps[is_empty][0]), numbers)


RULE = Rule(
    fault="optimizer_anew",
    title="The optimizer is made anew at each step",
    needs=(OPTIMIZER, UPDATES),
    find=find,
    advice="Make the optimizer once, before the loop. A new one has no momentum, and each of its "
    "steps is the first one: Adam's then has the same size for all gradients.",
    explains=("lr_edge", "labels_random"),
)
