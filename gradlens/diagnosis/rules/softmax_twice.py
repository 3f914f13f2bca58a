"""Softmax or sigmoid is applied twice: before the loss, and in it."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import GRAPH
from gradlens.diagnosis.rule import Rule, Sign

HARMLESS = "log_softmax"
"""A second log-softmax returns what it is given, so that it does no harm."""


def find(evidence: Evidence) -> Iterator[Sign]:
    step = evidence.since(lambda setup: bool(setup.before_loss))
    if step is None:
        return
    kind = evidence.setup.before_loss
    if kind == HARMLESS:
        advice = "This changes nothing but the time it takes: pass the scores before log_softmax."
        title = "The loss gets the output of a log_softmax and computes it once more"
        yield Sign(step, is_alarm=False, title=title, advice=advice)
    else:
        yield Sign(step, title=f"The loss gets the output of a {kind}, and applies another one")


RULE = Rule(
    fault="softmax_twice",
    title="Softmax or sigmoid is applied twice",
    needs=(GRAPH,),
    find=find,
    advice="Pass logits, the scores before the softmax or sigmoid: CrossEntropyLoss and "
    "BCEWithLogitsLoss apply it themselves. Applied twice, it keeps the loss high and gradients "
    "small.",
    explains=("vanishing_gradients", "lr_too_low", "labels_random"),
)
