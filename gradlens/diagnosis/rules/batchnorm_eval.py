"""Batch normalisation in evaluation mode while training."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import SETUP
from gradlens.diagnosis.rule import Rule, Sign, above
from gradlens.history.setup import Setup

BASE = "_BatchNorm"


def evaluating(setup: Setup) -> tuple[str, ...]:
    """The batch normalisations that are in evaluation mode."""
    layers = setup.layers.items()
    return tuple(n for n, each in layers if BASE in each.classes and not each.training)


def find(evidence: Evidence) -> Iterator[Sign]:
    step = evidence.since(lambda setup: bool(evaluating(setup)))
    if step is None:
        return
    where = evaluating(evidence.setup)
    frozen = {name.rpartition(".")[0] for name in evidence.setup.frozen}
    yield Sign(
        step,
        (above("batch normalisations in evaluation mode", len(where), 0),),
        is_alarm=not frozen >= {*where},
        where=where,
    )


RULE = Rule(
    fault="batchnorm_eval",
    title="Batch normalisation is in evaluation mode",
    needs=(SETUP,),
    find=find,
    advice="Call model.train() before training, and again after each evaluation. In fine-tuning, "
    "statistics may be frozen on purpose.",
    explains=("lr_too_high", "lr_edge", "dead_units", "constant_output", "labels_random"),
)
