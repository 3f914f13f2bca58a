"""The target of the loss is trained, too."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import GRAPH
from gradlens.diagnosis.rule import Rule, Sign


def find(evidence: Evidence) -> Iterator[Sign]:
    step = evidence.since(lambda setup: setup.target_trained)
    if step is not None:
        yield Sign(step, is_alarm=evidence.setup.bootstrapped)


RULE = Rule(
    fault="target_trained",
    title="The target of the loss needs a gradient, so that it is moved towards the prediction",
    needs=(GRAPH,),
    find=find,
    advice="Compute targets under torch.no_grad(), or detach() them, as those of a value function "
    "or a teacher. Where two outputs are meant to approach each other, all is well.",
)
