"""A learning rate at which nothing is learnt in the time of the run."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.course import LONG_ENOUGH, STUCK
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS, UPDATE_SIZES
from gradlens.diagnosis.numbers import finite, largest, median
from gradlens.diagnosis.rule import Rule, Sign, above, below
from gradlens.diagnosis.rules.lr_too_high import signs as diverges

UPDATE = 5e-4
"""‖update‖/‖θ‖: measured 1e-3 and more in healthy runs, and at most 3e-4 in faulty ones."""
WARM_UP = 1.5
"""The latest learning rates over the earlier ones: a rate that still grows isn't judged."""
DEAD, RECORDS = 0.5, 3
"""Share of a ReLU's units that are dead at the last records, so that gradients vanish."""
ENOUGH, LOWERED = 5e-3, 0.1
"""The first updates over the weights, of a rate that isn't low; and the latest rate over the
highest, of a schedule."""
RISEN, EARLY = 1.3, 20
"""The loss over that at the start in the first steps, of a network that the rate has broken."""
PRETRAINED = 0.5
"""The first loss over chance: a network that was trained before is tuned by small steps."""


def find(evidence: Evidence) -> Iterator[Sign]:
    updates = evidence.update_ratio
    found = median(updates.values)
    if evidence.length < LONG_ENOUGH or not 0 < found < UPDATE or _is_warming_up(evidence):
        return
    if diverges(evidence) or _was_trained(evidence):
        return
    is_pretrained = evidence.first_loss < PRETRAINED * evidence.chance
    if evidence.progress > STUCK and not evidence.ends_badly and not is_pretrained:
        numbers = (
            below("size of updates, over that of weights", found, UPDATE),
            above("late loss, over that without learning", evidence.progress, STUCK),
        )
        yield Sign(int(evidence.loss.steps[0]) + LONG_ENOUGH - 1, numbers, "very likely")


def _was_trained(evidence: Evidence) -> bool:
    """Whether updates are tiny for another reason: units that died, or a rate that was higher.

    A network that large updates have broken at the start is worse off with still larger ones.
    """
    dead = [median(shares[-RECORDS:]) for shares in evidence.by_name("dead").values.values()]
    rates, updates = finite(evidence.column("lr")), finite(evidence.update_ratio.values)
    return (
        largest(dead) > DEAD
        or bool(rates.size and rates[-1] < LOWERED * rates.max())
        or largest(updates[:RECORDS]) > ENOUGH
        or largest(evidence.level[:EARLY]) > RISEN * evidence.start
    )


def _is_warming_up(evidence: Evidence) -> bool:
    rates = evidence.column("lr")
    half = len(rates) // 2
    return largest(rates[half:]) > WARM_UP * median(rates[: half + 1])


RULE = Rule(
    fault="lr_too_low",
    title="The learning rate is too low: updates are tiny and nothing is learnt",
    needs=(LOSS, UPDATE_SIZES),
    find=find,
    advice="Multiply the learning rate by 10, and again until the loss falls.",
    others=("vanishing_gradients", "adam_epsilon", "clipping_always"),
    explains=("labels_random",),
)
