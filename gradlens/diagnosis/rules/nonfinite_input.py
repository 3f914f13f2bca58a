"""Inputs that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import BAD_ROWS
from gradlens.diagnosis.numbers import first
from gradlens.diagnosis.rule import Rule, Sign, above


def find(evidence: Evidence) -> Iterator[Sign]:
    bad = evidence.column("bad_rows")
    place = first(bad > 0)
    if place is not None:
        numbers = (
            above("samples with a NaN or infinite input, in this batch", bad[place], 0),
            above("steps with such samples", (bad > 0).sum(), 0),
        )
        step = int(evidence.steps[place])
        samples = evidence.sample(step, evidence.column("bad_row")[place])
        yield Sign(step, numbers, samples=samples)


RULE = Rule(
    fault="nonfinite_input",
    title="A sample has a NaN or infinite input",
    needs=(BAD_ROWS,),
    find=find,
    advice="Clean or leave out the sample: one such number makes all parameters NaN in one step.",
    explains=("precision_underflow", "dead_units", "lr_too_high", "lr_edge"),
)
