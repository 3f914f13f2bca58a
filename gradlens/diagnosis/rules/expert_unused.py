"""Experts that no sample is sent to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import GRADIENTS
from gradlens.diagnosis.numbers import largest, median
from gradlens.diagnosis.rule import Rule, Sign, below

NAME = re.compile(r"(.*experts?.*?)\.(\d+)\.(.*)")
"""Of a parameter of an expert: the list of experts, the number of this one, and the rest."""
SMALLEST = 1e-4
"""An expert's largest gradient after the first fifth of the run, over the median of its siblings'.
An expert that is used rarely has a large one at some steps."""
FIRST = 0.2
RECORDS = 5
"""Gradients of each expert, at least."""
FEWEST = 2
"""Experts, besides the one that is unused."""


def find(evidence: Evidence) -> Iterator[Sign]:
    gradients = evidence.by_name("gradient_rms")
    if not len(gradients.steps):
        return
    start = gradients.steps[0] + FIRST * (gradients.steps[-1] - gradients.steps[0])
    later = gradients.steps > start
    if later.sum() < RECORDS:
        return
    unused: dict[str, float] = {}
    for experts in _siblings(gradients.values).values():
        most = {name: largest(np.nan_to_num(gradients.values[name][later])) for name in experts}
        typical = median([*most.values()])
        if len(experts) > FEWEST and typical > 0:
            unused |= {n: m / typical for n, m in most.items() if m < SMALLEST * typical}
    where = tuple(dict.fromkeys(name.rpartition(".")[0] for name in unused))
    if where:
        name = "largest gradient of an expert, over the median of its siblings"
        numbers = (below(name, largest([*unused.values()]), SMALLEST),)
        yield Sign(int(gradients.steps[later][0]), numbers, "very likely", where=where)


def _siblings(names: Mapping[str, object]) -> dict[tuple[str, str], list[str]]:
    """Parameters that stand for each other in the experts of one list."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = NAME.fullmatch(name)
        if match is not None:
            found.setdefault((match[1], match[3]), []).append(name)
    return found


RULE = Rule(
    fault="expert_unused",
    title="Experts are not used",
    needs=(GRADIENTS,),
    find=find,
    advice="Balance the experts by a loss, or add noise to the gate: an expert that no sample is "
    "sent to has no gradient, and stays unused.",
    sources=("Shazeer et al. (2017), arXiv:1701.06538, Sec. 4",),
)
