"""Layers follow each other without a nonlinearity between."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import GRAPH
from gradlens.diagnosis.rule import Rule, Sign, above


def find(evidence: Evidence) -> Iterator[Sign]:
    step = evidence.since(lambda setup: bool(setup.linear_pairs))
    if step is None:
        return
    pairs, is_linear = evidence.setup.linear_pairs, evidence.setup.is_linear
    yield Sign(
        step,
        (above("pairs of layers with nothing nonlinear between", len(pairs), 0),),
        is_alarm=is_linear,
        where=tuple(dict.fromkeys(name for pair in pairs for name in pair)),
        title="The whole network is linear" if is_linear else "",
    )


RULE = Rule(
    fault="no_nonlinearity",
    title="Layers follow each other without a nonlinearity between",
    needs=(GRAPH,),
    find=find,
    advice="Put an activation between them: together they are one linear layer. In "
    "low-rank factors and depthwise-separable convolutions, this is on purpose.",
    explains=("labels_random",),
)
