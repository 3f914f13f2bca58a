"""Parameters that need no gradient."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import SETUP
from gradlens.diagnosis.rule import Rule, Sign, above


def find(evidence: Evidence) -> Iterator[Sign]:
    step = evidence.since(lambda setup: bool(setup.frozen))
    if step is not None:
        frozen = evidence.setup.frozen
        numbers = (above("parameters with requires_grad=False", len(frozen), 0),)
        yield Sign(step, numbers, is_alarm=False, where=frozen)


RULE = Rule(
    fault="frozen_layer",
    title="Parameters of the model are frozen",
    needs=(SETUP,),
    find=find,
    advice="If this isn't on purpose (in fine-tuning it often is), set requires_grad to True "
    "before the optimizer and the cockpit are created.",
    explains=("lr_too_low", "labels_random"),
)
