"""Momentum that averages over more steps than it should."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.course import is_stuck, rise
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS, OPTIMIZER
from gradlens.diagnosis.numbers import largest
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above

HIGHEST = 0.98
"""A momentum above the usual 0.9 and 0.95; 0.99 is used with large batches and long runs."""
RARE, SHARE = 0.99, 0.25
"""A momentum above the first, or an Adam's β₁ above the usual one, is hardly ever intended. It is
an alarm by itself if gradients are averaged over more than the second's share of the steps."""
RISE = 1.3
"""The loss over that at the start, after the first steps: measured at most 1.3 in healthy runs."""


def find(evidence: Evidence) -> Iterator[Sign]:
    momentum = largest([evidence.option("momentum"), evidence.option("beta1")])
    if not momentum > HIGHEST:
        return
    memory = round(1 / max(1 - momentum, 1e-6))
    highest = rise(evidence)
    numbers = [
        above("momentum", momentum, HIGHEST),
        above("steps that it averages over", memory, round(1 / (1 - HIGHEST))),
    ]
    if highest > RISE:
        numbers.append(above("loss over that at the start, at three steps", highest, RISE))
    is_rare = momentum > RARE or evidence.option("beta1") > HIGHEST
    is_slow = is_rare and memory > SHARE * evidence.length
    is_alarm = highest > RISE or is_stuck(evidence) or is_slow
    yield Sign(int(evidence.loss.steps[0]), tuple(numbers), is_alarm=is_alarm)


RULE = Rule(
    fault="momentum_high",
    title="Momentum averages over very many steps",
    needs=(OPTIMIZER, LOSS),
    find=find,
    advice="Use a momentum of 0.9, or a lower learning rate: with momentum b, steps are 1/(1 - b) "
    "times as long.",
    others=("lr_edge", "zero_grad_missing"),
    explains=("overfitting", *INSTABILITY, *NO_PROGRESS),
)
