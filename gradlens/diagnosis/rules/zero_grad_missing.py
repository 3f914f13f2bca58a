"""Gradients of past steps are added to those of the present one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import STALE
from gradlens.diagnosis.numbers import first, share
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above

SHARE = 0.5
"""Share of the steps; a loop that has ``zero_grad`` has none (the fact leaves out what isn't
certain)."""
FEWEST = 4
"""Steps, so that a gradient that remains from before training doesn't count."""


def find(evidence: Evidence) -> Iterator[Sign]:
    stale = evidence.column("stale")
    known = np.isfinite(stale)
    known[:1] = False  # there is no step before the first
    found = share(stale > 0, known)
    if known.sum() >= FEWEST and found > SHARE:
        place = first(known & (stale > 0))
        assert place is not None
        yield Sign(
            int(evidence.steps[place]),
            (above("share of steps that begin with the gradients of the last one", found, SHARE),),
        )


RULE = Rule(
    fault="zero_grad_missing",
    title="Gradients of past steps are never set to zero",
    needs=(STALE,),
    find=find,
    advice="Call optimizer.zero_grad() before each backward pass. To accumulate micro-batches on "
    "purpose, call the optimizer's step after the last of them only.",
    others=("momentum_high", "lr_edge"),
    explains=(*INSTABILITY, *NO_PROGRESS),
)
