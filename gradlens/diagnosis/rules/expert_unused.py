"""Experts that no sample is sent to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import GRADIENTS
from gradlens.diagnosis.rule import Rule, Sign, below
from gradlens.history.lines import Floats

NAME = re.compile(r"(.*experts?.*?)\.(\d+)\.(.*)")
"""The name of an expert's parameter: the list of experts, the number of this one, and the rest."""
SMALLEST, SHARE = 1e-3, 0.5
"""An expert's gradient over the median of those in use at the same step, and at how many of the
steps after the first fifth of the run it is so small."""
OF_ALL = 0.01
"""The root mean square of all of these gradients, over that of those in use: measured 0.002 where
an expert has got its first few samples late in the run. One that is used rarely has gradients of
the others' size at some steps, and 0.03 or more in all."""
FIRST = 0.2
RECORDS = 5
"""Recorded gradients of each expert; with fewer, nothing is said."""
FEWEST = 2
"""Other experts that the unused one is compared with, at least."""


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
        if len(experts) > FEWEST:
            unused |= _unused(experts, np.nan_to_num(gradients.matrix(tuple(experts))[:, later]))
    where = tuple(dict.fromkeys(name.rpartition(".")[0] for name in unused))
    if where:
        name = "gradients of an expert, over those of the others"
        numbers = (below(name, max(unused.values()), OF_ALL),)
        yield Sign(int(gradients.steps[later][0]), numbers, "very likely", where=where)


def _unused(experts: Sequence[str], table: Floats) -> dict[str, float]:
    """The gradients of unused experts over those of the ones in use; ``table`` is by expert."""
    sizes = np.sqrt((table**2).mean(axis=1))
    in_use = sizes > OF_ALL * sizes.max()
    if not in_use.any():
        return {}
    shares = sizes / np.median(sizes[in_use])
    is_rare = (table <= SMALLEST * np.median(table[in_use], axis=0)).mean(axis=1) >= SHARE
    unused = np.flatnonzero(is_rare & (shares < OF_ALL)).tolist()
    return {experts[n]: float(shares[n]) for n in unused}


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
    advice="Add a loss that balances the experts, or noise to the gate: an expert that no sample "
    "is sent to has no gradient, and stays unused.",
    sources=("Shazeer et al. (2017), arXiv:1701.06538, Sec. 4",),
)
