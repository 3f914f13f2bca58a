"""A loss that is summed over the batch, or gradients that are summed over batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradlens.diagnosis.course import is_high, is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import SAMPLES, SETUP
from gradlens.diagnosis.numbers import finite, median, ratio
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above
from gradlens.diagnosis.rules.lr_too_high import signs as diverges
from gradlens.history.finding import Certainty


def find(evidence: Evidence) -> Iterator[Sign]:
    samples = evidence.typical("samples")
    step = evidence.since(lambda setup: (setup.loss_reduction or setup.declared_reduction) == "sum")
    if step is not None and samples > 1:
        numbers = (above("times that gradients are those of the mean loss", samples, 1.0),)
        is_alarm = not evidence.is_adaptive and (is_high(evidence) or is_stuck(evidence))
        yield Sign(step, numbers, is_alarm=is_alarm)
    yield from _of_batches(evidence)


UPDATES = 3
"""The least number of updates, and of the batches of each."""


def _of_batches(evidence: Evidence) -> Iterator[Sign]:
    """Gradients of several batches for each update, where the loss may not have been divided.

    Whether it was is known where single losses are; else this is a sign of a run that diverges.
    """
    updates = finite(evidence.column("updates"))
    count = round(len(updates) / max((updates > 0).sum(), 1))
    divided = median(ratio(evidence.column("loss"), evidence.column("loss_median")))
    if not UPDATES <= count <= len(updates) / UPDATES or divided < 2 / count:
        return
    if not evidence.is_adaptive and (is_high(evidence) or diverges(evidence)):
        numbers = (above("batches whose gradients are added up for an update", count, 1),)
        step, is_known = int(evidence.steps[0]), math.isfinite(divided)
        certainty: Certainty = "very likely" if is_known else "consistent with"
        yield Sign(step, numbers, certainty, title=ADDED, advice=DIVIDE)


ADDED = "Gradients of several batches are added up for each update"
DIVIDE = (
    "Divide the loss by the number of batches that make an update: otherwise the learning rate is "
    "as many times higher."
)


RULE = Rule(
    fault="loss_sum",
    title="The loss is summed over the batch",
    needs=(SETUP, SAMPLES),
    find=find,
    advice='Use reduction="mean", or divide the learning rate by the batch size. With Adam and its '
    "like it makes no difference.",
    others=("lr_too_high",),
    explains=(*INSTABILITY, *NO_PROGRESS),
)
