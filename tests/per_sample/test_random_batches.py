"""How many samples there are and whose rows are whose, in random programs: right, or refused."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.cases.random_batches import LOSSES, Findings, draw_program, examine

PROGRAMS = 120

COVERED = {False: 0.45, True: 0.65}
"""The least share of parameters, over many programs, without N and with N passed.

In a fifth of the programs samples meet, and in a third two axes have N entries.
"""


@cache
def findings_of(seed: int) -> Findings:
    return examine(draw_program(random.Random(seed)))


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_program(seed: int) -> None:
    """What is covered is right, and what a refusal advises is enough."""
    findings = findings_of(seed)
    assert not findings.problems, draw_program(random.Random(seed))
    assert not any(reason.endswith("EMPTY") for reason in findings.reasons)


@pytest.mark.slow
def test_most_is_covered() -> None:
    losses = {draw_program(random.Random(seed)).loss for seed in range(PROGRAMS)}
    assert losses == LOSSES.keys()
    covered = [findings_of(seed).covered for seed in range(0, PROGRAMS, 3)]
    for told, least in COVERED.items():
        assert sum(each[told] for each in covered) >= least * len(covered)
