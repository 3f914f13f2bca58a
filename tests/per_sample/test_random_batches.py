"""How many samples there are and whose rows are whose, in random programs: right, or refused."""

from __future__ import annotations

import random

import pytest

from tests.cases.random_batches import LOSSES, draw_program, examine

PROGRAMS = 120

COVERED = {False: 0.45, True: 0.65}
"""The least share of parameters, over many programs, without N and with N passed.

In a fifth of the programs samples meet, and in a third two axes have N entries.
"""


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_program(seed: int) -> None:
    """What is covered is right, and what a refusal advises is enough."""
    program = draw_program(random.Random(seed))
    findings = examine(program)
    assert not findings.problems, program
    assert not any(reason.endswith("EMPTY") for reason in findings.reasons)


@pytest.mark.slow
def test_most_is_covered() -> None:
    programs = [draw_program(random.Random(seed)) for seed in range(PROGRAMS)]
    assert {program.loss for program in programs} == LOSSES.keys()
    covered = [examine(program).covered for program in programs[::3]]
    for told, least in COVERED.items():
        assert sum(each[told] for each in covered) >= least * len(covered)
