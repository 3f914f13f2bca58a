"""Batch normalisation over a single sample."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import SAMPLES, SETUP
from gradlens.diagnosis.numbers import share
from gradlens.diagnosis.rule import Rule, Sign, above
from gradlens.diagnosis.rules.batchnorm_eval import BASE

SHARE = 0.01
"""Share of the steps. If it is less, as at the end of long epochs, the finding is a notice."""


def find(evidence: Evidence) -> Iterator[Sign]:
    layers = evidence.setup.layers.items()
    where = tuple(n for n, each in layers if BASE in each.classes and each.training)
    samples = evidence.column("samples")
    found = share(samples == 1, samples > 0)
    if where and found > 0:
        is_alarm = found > SHARE
        numbers = (above("share of steps with one sample", found, SHARE if is_alarm else 0),)
        yield Sign(int(evidence.steps[samples == 1][0]), numbers, is_alarm=is_alarm, where=where)


RULE = Rule(
    fault="batch_of_one",
    title="Batch normalisation has one sample to normalise with",
    needs=(SETUP, SAMPLES),
    find=find,
    advice="Use larger batches, and drop_last=True if only the last batch of an epoch has one "
    "sample; or use GroupNorm or LayerNorm, which don't depend on the batch.",
    explains=("batch_too_small", "lr_edge", "lr_too_high", "labels_random"),
)
