"""Units of a tanh or sigmoid that are at the ends of their range."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import SATURATED
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign
from gradlens.diagnosis.rules.dead_units import inactive

SHARE = 0.5
"""Share of a layer's outputs within 2 % of the ends: measured about 0 at the start of healthy
runs, and 0.95 in faulty ones. Later, units of trained networks saturate as well."""


def find(evidence: Evidence) -> Iterator[Sign]:
    words = "share of the outputs of a tanh or sigmoid within 2 % of its ends"
    return inactive(evidence, "saturated", words, SHARE)


RULE = Rule(
    fault="saturated_units",
    title="Most units of a tanh or sigmoid are saturated",
    needs=(SATURATED,),
    find=find,
    advice="Use smaller weights at the start (Glorot), or smaller inputs.",
    others=("exploding_gradients", "input_scale", "lr_too_high"),
    explains=NO_PROGRESS,
    sources=("Glorot and Bengio (2010)",),
)
