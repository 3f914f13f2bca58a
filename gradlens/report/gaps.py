"""Where a number per step is missing, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradlens.history.lines import Floats, Line
from gradlens.history.series import Series
from gradlens.history.undefined import Undefined

MOST = 1000
"""Largest number of missing values of a series that a page has, evenly over all of them."""

INFINITE = "infinite"
UNKNOWN = "not a number"


@dataclass(frozen=True)
class Gaps:
    """Steps ``[G]`` whose value isn't a finite number, and which of the ``reasons`` each has."""

    steps: Floats
    which: NDArray[np.uint8]
    reasons: tuple[str, ...]


def gaps(line: Line, records: Sequence[Series]) -> Gaps:
    """The missing values of a line that was made of the records of some series."""
    places = np.flatnonzero(~np.isfinite(line.values))
    if places.size > MOST:
        places = places[np.linspace(0, places.size - 1, MOST).astype(np.int64)]
    steps, values = line.steps[places], line.values[places]
    words = [
        INFINITE if np.isinf(value) else _reason_at(int(step), records)
        for step, value in zip(steps, values, strict=True)
    ]
    # The numbers of the reasons have one byte.
    known = tuple(dict.fromkeys(words))[:256]
    which = [known.index(word) if word in known else 0 for word in words]
    return Gaps(steps, np.array(which, dtype=np.uint8), known)


def _reason_at(step: int, records: Sequence[Series]) -> str:
    return next(filter(None, (reason(series.get(step)) for series in records)), UNKNOWN)


def reason(value: Any) -> str:
    """Why a record has no number: its own reason, or that of the first of its entries with one."""
    if isinstance(value, Undefined):
        return value.reason
    if isinstance(value, Mapping):
        return next(filter(None, map(reason, value.values())), str(value.get("reason") or ""))
    return ""
