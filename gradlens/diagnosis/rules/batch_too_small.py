"""Batches whose gradients are almost only noise."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.course import is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import SAMPLES
from gradlens.diagnosis.rule import Rule, Sign, below

SMALL = 4
"""Samples of a small batch. It is an alarm if nothing is learnt."""
LABELS = 64
"""Labels of a batch of texts that isn't small, with one for each word. Those of the pixels of an
image depend on each other."""
FEWEST = 4
"""Steps; fewer are a first look at a network, and not a training."""


def find(evidence: Evidence) -> Iterator[Sign]:
    samples = evidence.column("samples")
    typical = evidence.typical("samples")
    is_text = evidence.setup.input_kind == "integers" and evidence.typical("labels") >= LABELS
    if (samples > 0).sum() < FEWEST or is_text:
        return
    if typical <= SMALL:
        numbers = (below("samples in a batch", typical, SMALL + 1),)
        first = int(evidence.steps[samples <= SMALL][0])
        yield Sign(first, numbers, is_alarm=is_stuck(evidence))


RULE = Rule(
    fault="batch_too_small",
    title="Batches have very few samples",
    needs=(SAMPLES,),
    find=find,
    advice="Use larger batches, or accumulate the gradients of several batches before each step; "
    "otherwise use a lower learning rate, which averages over more batches.",
    others=("lr_edge",),
    explains=("clipping_always", "lr_too_high", "lr_edge", "labels_random"),
)
