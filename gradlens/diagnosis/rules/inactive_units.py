"""Units of a ReLU that are zero for all samples, and of a tanh or sigmoid at the ends of theirs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import DEAD, SATURATED
from gradlens.diagnosis.numbers import first, largest, median
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, above

SATURATED_SHARE = 0.5
"""Share of a layer's outputs within 2 % of the ends: measured about 0 at the start of healthy
runs, and 0.95 in faulty ones. Later, units of trained networks saturate as well."""


def saturated(evidence: Evidence) -> Iterator[Sign]:
    words = "share of the outputs of a tanh or sigmoid within 2 % of its ends"
    return inactive(evidence, "saturated", words, SATURATED_SHARE)


SHARE = 0.6
"""Share of a layer's units: measured at most 0.5 at the start of healthy runs (inputs in 0 to 1
that learn nothing), and 0.75 and more in faulty ones."""
RECORDS = 3
"""Records at the start, which must agree."""
BY_CHANCE = 0.75
"""Of a layer of n units, so much over √n more than half are dead by chance: 1.5 standard
deviations, where each unit is dead with a probability of a half."""
LEARNT, LEARNT_WELL = 0.5, 0.25
"""The late loss over that without learning, of a network that learns in spite of them: without any
unit of a layer, which isn't on the way of all signals then; and without most of them, so that it is
a notice."""
SMALLEST = 8
"""Samples of a batch: in smaller ones, a healthy unit is often zero for all of them."""


def dead(evidence: Evidence) -> Iterator[Sign]:
    # Of graphs and texts, each node or word has a label.
    if not largest([evidence.typical("samples"), evidence.typical("labels")]) >= SMALLEST:
        return
    words = "share of a ReLU's units that are zero for the whole batch"
    yield from inactive(evidence, "dead", words, SHARE)


def inactive(evidence: Evidence, kind: str, words: str, limit: float) -> Iterator[Sign]:
    """Layers with inactive units from the start, or at the end of a run that learns nothing."""
    found = evidence.by_name(kind)
    start = {n: found.values[n][:1].sum() for n in found.values}
    early = tuple(
        name
        for name, shares in found.values.items()
        if min(start[name], median(shares[:RECORDS])) > limit
        if kind != "dead" or start[name] > _by_chance(evidence, name)
        if start[name] < 1 or not evidence.progress < LEARNT
    )
    if early:
        numbers = (above(words, largest([start[n] for n in early]), limit),)
        is_alarm = not evidence.progress < LEARNT_WELL
        yield Sign(int(found.steps[0]), numbers, "very likely", is_alarm, early)
    late = tuple(
        n for n in found.values if n not in early and median(found.values[n][-RECORDS:]) > limit
    )
    if late and is_stuck(evidence) and len(found.steps) > RECORDS:
        table = found.matrix(late)
        place = first(np.asarray((table > limit).any(axis=0)))
        assert place is not None
        numbers = (above(words, largest(table[:, -RECORDS:]), limit),)
        yield Sign(int(found.steps[place]), numbers, "very likely", where=late)


def _by_chance(evidence: Evidence, layer: str) -> float:
    """The share of a layer's units that may be dead by chance; less than all of them."""
    units = evidence.history.parameters.get(f"{layer}.weight", (0,))[0]
    return min(0.5 + BY_CHANCE / math.sqrt(units), 0.99) if units else 0.0


RULES = (
    Rule("saturated_units", "Most units of a tanh or sigmoid are saturated",
         needs=(SATURATED,), find=saturated,
         others=("exploding_gradients", "input_scale", "lr_too_high"), explains=NO_PROGRESS,
         sources=("Glorot and Bengio (2010)",),
         advice="Use smaller weights at the start (Glorot), or smaller inputs."),
    Rule("dead_units", "Most units of a ReLU are dead",
         needs=(DEAD,), find=dead, others=("lr_too_high", "input_offset", "symmetric_init"),
         explains=("no_gradient", *NO_PROGRESS),
         advice="Start with biases of zero and He initialisation; if units die while training, "
                "use a lower learning rate; or use GELU or leaky ReLU."),
)  # fmt: skip
