"""Gradients that are too small for the numbers that they are kept in."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import SETUP, ZEROS
from gradlens.diagnosis.numbers import largest, median
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, above

HALF_ZEROS = 0.1
"""Exact zeros of a weight's gradient, in float16 without a scaler: measured 0.1 and more."""
LEARNT = 0.5
"""The late loss over that without learning, of a network that learns in spite of them."""
ZEROS_ANYWAY = 0.9
"""Exact zeros in other cases: measured at most 0.33 in healthy runs with ReLU."""
DEAD = 0.5
"""Share of dead units in a layer, which make zeros by themselves."""


def find(evidence: Evidence) -> Iterator[Sign]:
    step = evidence.since(lambda setup: setup.half and not setup.scaler)
    zeros = evidence.by_name("zero_gradients")
    shares = {n: median(zeros.values[n]) for n in evidence.trained if n in zeros.values}
    if step is not None:
        where = tuple(name for name, found in shares.items() if found > HALF_ZEROS)
        most = above("exact zeros of a weight's gradient", largest([*shares.values()]), HALF_ZEROS)
        is_alarm = bool(where) and not evidence.progress < LEARNT
        yield Sign(step, (most,) if where else (), is_alarm=is_alarm, where=where)
        return
    where = tuple(name for name, found in shares.items() if found > ZEROS_ANYWAY)
    dead = largest([median(each) for each in evidence.by_name("dead").values.values()])
    is_half = evidence.setup.half or "float16" in evidence.setup.dtypes
    if where and is_half and not dead > DEAD:
        numbers = (above("exact zeros of a weight's gradient", largest([*shares.values()]),
                         ZEROS_ANYWAY),)  # fmt: skip
        yield Sign(int(zeros.steps[0]), numbers, "very likely", where=where)


RULE = Rule(
    fault="precision_underflow",
    title="float16 is used without a gradient scaler",
    needs=(SETUP, ZEROS),
    find=find,
    advice="Scale the loss with torch.amp.GradScaler, and pass it to the context by scaler=scaler; "
    "or use bfloat16, which has the range of float32.",
    others=("vanishing_gradients", "dead_units"),
    explains=(
        "nonfinite_loss",
        "nonfinite_gradient",
        "nonfinite_weights",
        "overfitting",
        *NO_PROGRESS,
    ),
)
