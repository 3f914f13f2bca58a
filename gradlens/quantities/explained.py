"""Reasons why values are NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradlens.history.undefined import Undefined

EMPTY = "the batch is empty"
NO_FEATURES = "the layer has no features"
NO_ELEMENTS = "the parameter has no elements"
NOT_CONVERGED = "the eigenvalues or singular values are unknown: LAPACK did not converge"


def all_explained(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """``explained`` values by name; ``what`` they are of comes in front of the name."""
    return {
        # Most values are numbers, for which a call takes longer than this check.
        name: value
        if type(value) is float and value == value
        else explained(value, f"{what} {name}")
        for name, value in values.items()
    }


def explained(value: Any, what: str) -> Any:
    """The value, in which each NaN has a reason: ``what`` is not finite.

    Applies to a number, and to the numbers in nested dicts. A NaN that has a reason keeps it. Other
    values, such as arrays, are returned unchanged.
    """
    if isinstance(value, Mapping):
        return {key: explained(part, what) for key, part in value.items()}
    number = isinstance(value, float) or (isinstance(value, Tensor) and value.dim() == 0)
    if number and not isinstance(value, Undefined) and math.isnan(float(value)):
        return Undefined(f"{what} has NaN or Inf")
    return value
