"""Whether a record's NaN have reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import gradlens
from gradlens.history.undefined import Undefined

INTERNAL = re.compile(
    r"object has no attribute|NoneType|list index|KeyError|AssertionError|not subscriptable|"
    r"unexpected keyword|positional argument"
)
"""Words of reasons that are about gradlens's code, not about the user's network."""


def unexplained(history: gradlens.History) -> Iterator[str]:
    """NaN without a reason, and reasons that explain nothing."""
    for name in history.names:
        for step, value in history[name].items():
            for place, number in leaves(value):
                if not isinstance(number, float) or not math.isnan(number):
                    continue
                reason = number.reason if isinstance(number, Undefined) else ""
                if not reason and name not in OF_TRAINING:
                    yield f"unexplained: NaN without a reason in {name}{place} at step {step}"
                elif INTERNAL.search(reason):
                    yield f"unexplained: reason of {name}: {reason[:200]}"
    for coverage in history.coverages.values():
        for reason in coverage.missing.values():
            if not reason or INTERNAL.search(reason):
                yield f"unexplained: missing per-sample gradients: {reason[:200]!r}"


OF_TRAINING = {"Loss", "GradNorm", "ParameterNorm", "Distance", "UpdateSize", "Parameters"}
"""Quantities that are NaN where training is."""


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"[{key}]")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part, f"{place}[]")
    else:
        yield place, value
