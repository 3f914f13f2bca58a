"""Values of the training loop's own: those that are logged, and those that are pushed."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from gradlens.cockpit.plain import to_plain
from gradlens.history.json_lines import Value
from gradlens.history.records import Source
from gradlens.history.undefined import Undefined
from gradlens.history.view import View

PUSHED = Source(("Aggregate",), View("", group="performance"))
"""The source of all series of pushed metrics."""


def loggable(name: str, value: Any) -> Value:
    """A value as a history holds it; ``TypeError`` names what can't be logged."""
    if name == "epoch_count" and isinstance(value, Mapping):
        raise TypeError(
            f"log(step, {_in_words(value)}): pass values by name, as in log(step, **values)"
        )
    try:
        return to_plain(value)
    except TypeError as error:
        raise TypeError(f"log({name}=...): {error}") from error


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
