"""Metrics of the training loop that are pushed to a cockpit, for statistics over an epoch."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
from torch import Tensor

from gradlens.cockpit.plain import to_plain
from gradlens.history.history import Source
from gradlens.history.undefined import Undefined
from gradlens.history.view import View

PUSHED = Source(("Aggregate",), View("", group="performance"))
"""The source of all series of pushed metrics."""


def pushable(name: str, value: Any) -> float:
    """The value of a metric as a float; ``TypeError`` names the metric if it isn't a number."""
    try:
        plain = to_plain(value)
        if isinstance(plain, np.ndarray) and plain.size == 1:
            plain = plain.item()
        if isinstance(plain, (int, float)):
            return plain if isinstance(plain, Undefined) else float(plain)
    except (TypeError, OverflowError):
        pass
    raise TypeError(
        f"push({name}=...) takes a number, or a tensor or array of one element, and got "
        f"{_in_words(value)}"
    )


def _in_words(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    return reprlib.repr(value)
