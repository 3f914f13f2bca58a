"""Weight decay that shrinks the weights faster than they learn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import OPTIMIZER, WEIGHTS
from gradlens.diagnosis.numbers import first, largest, ratio
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, below

SHRUNK = 0.7
"""The geometric mean of the weights' sizes over those at the start: measured 1 and more in healthy
runs, and at most 0.56 in faulty ones."""
MEMORY = 1.0
"""Steps in which decay shrinks weights to a third, over those of the run: measured 40 and more in
healthy runs, and at most 0.33 in faulty ones."""
LEARNT, LEARNT_WELL = 0.5, 0.25
"""The late loss over that without learning, of a network with normalisation and of one without: a
network that learns in spite of it may be meant to, above all with normalisation, for which the size
of weights is irrelevant."""


def find(evidence: Evidence) -> Iterator[Sign]:
    decay, rate = evidence.option("weight_decay"), largest(evidence.column("lr"))
    if not decay > 0 or not rate > 0:
        return
    momentum = evidence.option("momentum")
    memory = (1 - (momentum if momentum > 0 else 0)) / (rate * decay)
    weights = evidence.by_name("weight_rms")
    if evidence.length < 2 or not len(weights.steps) or not evidence.trained:
        return
    sizes = weights.matrix(evidence.trained)
    course = np.exp(np.nan_to_num(np.log(ratio(sizes, sizes[:, :1]))).mean(axis=0))
    if memory < MEMORY * evidence.length and course[-1] < SHRUNK:
        learnt = LEARNT if evidence.is_normalised else LEARNT_WELL
        place = first(course < SHRUNK)
        assert place is not None
        yield Sign(
            int(weights.steps[place]),
            (
                below("steps that decay remembers", memory, MEMORY * evidence.length),
                below("size of the weights, over that at the start", course[-1], SHRUNK),
            ),
            "very likely",
            is_alarm=not evidence.progress < learnt,
        )


RULE = Rule(
    fault="weight_decay_high",
    title="Weight decay is so strong that the weights shrink",
    needs=(OPTIMIZER, WEIGHTS),
    find=find,
    advice="Divide weight_decay by 10 or more, so that 1/(learning rate x decay) is more than "
    "the number of steps.",
    explains=("dead_units", *NO_PROGRESS),
    sources=("Wang and Aitchison (2024), arXiv:2405.13698: decay as a time scale",),
)
