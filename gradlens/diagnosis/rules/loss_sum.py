"""A loss that is summed over the batch."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.course import is_high, is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import SAMPLES, SETUP
from gradlens.diagnosis.rule import Rule, Sign, above


def find(evidence: Evidence) -> Iterator[Sign]:
    samples = evidence.typical("samples")
    step = evidence.since(lambda setup: (setup.loss_reduction or setup.declared_reduction) == "sum")
    if step is not None and samples > 1:
        numbers = (above("times that gradients are those of the mean loss", samples, 1.0),)
        is_alarm = not evidence.is_adaptive and (is_high(evidence) or is_stuck(evidence))
        yield Sign(step, numbers, is_alarm=is_alarm)


RULE = Rule(
    fault="loss_sum",
    title="The loss is summed over the batch",
    needs=(SETUP, SAMPLES),
    find=find,
    advice='Use reduction="mean", or divide the learning rate by the batch size. With Adam and its '
    "like it makes no difference.",
    others=("lr_too_high",),
    explains=(
        "nonfinite_loss",
        "nonfinite_gradient",
        "nonfinite_weights",
        "clipping_always",
        "saturated_units",
        "dead_units",
        "lr_too_high",
        "lr_edge",
        "corrupt_batch",
        "constant_output",
        "labels_random",
    ),
)
