"""Predictions and targets of different shapes, which are broadcast to all pairs."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import GRAPH
from gradlens.diagnosis.rule import Rule, Sign


def find(evidence: Evidence) -> Iterator[Sign]:
    step = evidence.since(lambda setup: bool(setup.broadcast))
    if step is not None:
        shapes = evidence.setup.broadcast
        title = f"The loss compares each prediction with all targets: {shapes}"
        yield Sign(step, certainty="very likely", title=title)


RULE = Rule(
    fault="loss_broadcast",
    title="The loss compares each prediction with all targets",
    needs=(GRAPH,),
    find=find,
    advice="Give predictions and targets the same shape, by outputs.squeeze(1) or "
    "targets.unsqueeze(1). As it is, the best that a network can learn is the mean target.",
    explains=("lr_too_low", "lr_edge", "labels_random", "label_noise"),
)
