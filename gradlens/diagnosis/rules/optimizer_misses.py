"""The optimizer lacks trainable parameters."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import OPTIMIZER
from gradlens.diagnosis.rule import Rule, Sign, above


def find(evidence: Evidence) -> Iterator[Sign]:
    step = evidence.since(lambda setup: bool(setup.missed))
    if step is not None:
        missed = evidence.setup.missed
        yield Sign(step, (above("trainable parameters in no group", len(missed), 0),), where=missed)


RULE = Rule(
    fault="optimizer_misses",
    title="The optimizer lacks trainable parameters",
    needs=(OPTIMIZER,),
    find=find,
    advice="Pass them to the optimizer: they have gradients and are never updated. Often a layer "
    "was added or replaced after the optimizer had been made.",
    explains=("symmetric_init", "dead_units", "lr_too_low", "labels_random"),
)
