"""Units that are all the same, and stay so."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.gains import is_weight
from gradlens.diagnosis.needs import ROW_SPREAD
from gradlens.diagnosis.numbers import largest
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, below
from gradlens.diagnosis.rules.unchanged import changes

SPREAD = 1e-3
"""The spread of a weight's rows over its size: measured 0.7 and more in healthy runs, and 0 in
faulty ones."""
STEPS = 10
"""Last layers and residual branches may be zero at the start, but not after some updates. Weights
that aren't zero have different rows at the start, too."""


def find(evidence: Evidence) -> Iterator[Sign]:
    spreads, sizes = evidence.by_name("row_spread"), evidence.by_name("weight_rms")
    names = tuple(n for n in evidence.trained if n in spreads.values)
    if not names or not any(changes(evidence, name) for name in sizes.values):
        return
    table = spreads.matrix(names)
    if sizes.steps.shape == spreads.steps.shape:
        # Of a weight that is zero, the spread is 0/0.
        table = np.where(sizes.matrix(names) == 0, 0.0, table)
    late = spreads.steps >= spreads.steps[0] + STEPS
    if not late.any():
        return
    later = np.asarray((table[:, late] < SPREAD).all(axis=1))
    # Noise such as dropout may part equal units slowly.
    has_units = np.array([_has_units(evidence, name) for name in names])
    first = np.asarray(spreads.matrix(names)[:, 0] < SPREAD) & has_units
    where = tuple(name for name, is_equal in zip(names, later | first, strict=True) if is_equal)
    if where:
        spread = largest(table[later][:, late]) if later.any() else largest(table[first][:, 0])
        numbers = (below("spread of rows, over the weight's size", spread, SPREAD),)
        yield Sign(int(spreads.steps[0]), numbers, where=where)


def _has_units(evidence: Evidence, name: str) -> bool:
    """Whether its rows are those of units whose gradients are as equal as they are.

    Those of the last layer's units aren't, nor are those of units with inputs of their own, as of
    depthwise convolutions. Parameters of other kinds may begin as equals.
    """
    inputs = evidence.history.parameters.get(name, (0, 0))[1]
    return is_weight(name) and inputs > 1 and name != evidence.weights[-1]


RULE = Rule(
    fault="symmetric_init",
    title="All units of a layer have the same weights",
    needs=(ROW_SPREAD,),
    find=find,
    advice="Draw the weights at random: units that begin as equals have equal gradients, and stay "
    "equal.",
    explains=("no_gradient", "saturated_units", "dead_units", *NO_PROGRESS),
)
